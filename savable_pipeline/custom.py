"""Base classes for your own stages, stores and pipelines.

Derive stages from `SampleStage`, `ItemStage` or `BatchStage`, and stores from `RecordStore`, which a `RecordReader`
reads. A function of a lane can build a pipeline from readers and stages, as `sp.read(…)` with its methods does.
`savable_pipeline` itself has the names that `sp.read` and a loader need.
"""

from savable_pipeline.public_names import public_names

__all__, __getattr__ = public_names(__name__)
