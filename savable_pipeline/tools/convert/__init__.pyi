"""Public names, one a line, for type checkers, editors and `public_names`."""

from savable_pipeline.tools.convert.conversion import convert as convert
from savable_pipeline.tools.convert.conversion import run_conversion as run_conversion
from savable_pipeline.tools.convert.options import REJECTED as REJECTED
from savable_pipeline.tools.convert.options import Options as Options
from savable_pipeline.tools.convert.options import Report as Report
from savable_pipeline.tools.convert.source import SourceFiles as SourceFiles
from savable_pipeline.tools.convert.source import find_files as find_files
