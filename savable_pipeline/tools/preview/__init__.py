"""`savable preview`: one HTML page that shows the samples of a dataset, or the batches of a pipeline.

    dataset  ─ dataset_page  ─ sample_entries ─────────────────── thumbnails ────┐
                                                                                 ├─ Card, Entry (page_model) ─ page
    pipeline ─ pipeline_page ─ batch_entries ─┬─ tensor_entries ─ thumbnails ────┤
                                              └─ token_entries ── token_decoder ─┘

The page has no script and loads nothing. Data is escaped as text, or decoded and encoded again as an image; how much of
it is read and shown is bounded.
"""

from savable_pipeline.tools.preview.dataset_page import preview_dataset
from savable_pipeline.tools.preview.pipeline_page import preview_pipeline

__all__ = ["preview_dataset", "preview_pipeline"]
