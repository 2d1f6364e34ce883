"""Public names, one a line, for type checkers, editors and `public_names`."""

from savable_pipeline.tools.convert.conversion import convert as convert
from savable_pipeline.tools.convert.conversion import run_conversion as run_conversion
from savable_pipeline.tools.convert.model import Options as Options
from savable_pipeline.tools.convert.model import Report as Report
from savable_pipeline.tools.convert.plan import REJECTED as REJECTED
from savable_pipeline.tools.convert.sources import ConversionSource as ConversionSource
from savable_pipeline.tools.convert.sources import recognize as recognize
