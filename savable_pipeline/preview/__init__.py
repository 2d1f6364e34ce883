"""`savable preview`: one HTML page that shows a dataset, or what a pipeline makes of it.

    dataset   ─ dataset_page  ─ parts ──────────── thumbnails ─┐
                                                               ├─ Card, Entry (shown) ─ page ─ page.html.jinja
    pipeline  ─ pipeline_page ─ fields ─ tensors ─ thumbnails ─┤
                                       └ tokens ── decoder ────┘

The page holds no script and loads nothing. Whatever comes of data is escaped as text, or decoded and encoded anew as
an image; how much of it is read and shown is bounded.
"""

from savable_pipeline.preview.dataset_page import preview_dataset
from savable_pipeline.preview.pipeline_page import preview_pipeline

__all__ = ["preview_dataset", "preview_pipeline"]
