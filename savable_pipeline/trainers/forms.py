"""A loader's state as JSON, for checkpoints that can only store JSON."""

from savable_pipeline.run.state.state_dict import from_json, to_json

__all__ = ["from_json", "to_json"]
