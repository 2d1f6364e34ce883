"""`savable preview`: HTML pages of a dataset's samples or a pipeline's batches.

    dataset_page ── sample_entries ─┬─ image_entries ────────────────┐
                        │           └─ media_entries ─ sound_entries ┤
    pipeline_page ──────┴───────────┬─ token_entries ────────────────┼─ Card, CardEntry ─ page
                                    └─ image_entries, sound_entries ─┘
    report_page ─ ledger_numbers ───────────────────────────────────────────────────────── page

A page has no script and loads nothing. Data is escaped as text, or decoded and encoded again as an image or a clip.
Only short audio and video is passed unchanged to a player of the page. The amount that is read and shown is bounded.
"""

from savable_pipeline.tools.preview.dataset_page import preview_dataset
from savable_pipeline.tools.preview.pipeline_page import preview_pipeline

__all__ = ["preview_dataset", "preview_pipeline"]
