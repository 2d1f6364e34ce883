"""`to_json`, `from_json`: a loader's state for a trainer's checkpoints that hold JSON alone."""

from savable_pipeline.run.state.json_form import from_json, to_json

__all__ = ["from_json", "to_json"]
