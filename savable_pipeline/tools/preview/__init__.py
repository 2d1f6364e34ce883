"""`savable preview`: HTML pages that show the samples of a dataset, or the batches of a pipeline.

    dataset_page ── sample_entries ─┬─ image_entries ────────────────┐
                        │           └─ media_entries ─ sound_entries ┤
    pipeline_page ──────┴───────────┬─ token_entries ────────────────┼─ Card, CardEntry ─ page
                                    └─ image_entries, sound_entries ─┘
    report_page ─ ledger_numbers ───────────────────────────────────────────────────────── page

A page has no script and loads nothing. Data is escaped as text, decoded and encoded again as an image or a clip, or, of
short audio and video, passed to a player of the page as it is. How much of it is read and shown is bounded.
"""

from savable_pipeline.tools.preview.dataset_page import preview_dataset
from savable_pipeline.tools.preview.pipeline_page import preview_pipeline

__all__ = ["preview_dataset", "preview_pipeline"]
