"""`skip_share`: a run of Energon's own, begun here at the same share of an epoch."""
