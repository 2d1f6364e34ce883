"""Packing: items end to end in one bounded sequence, and the balance of packs between ranks."""
