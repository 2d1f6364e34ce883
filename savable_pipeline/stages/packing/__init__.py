"""Packing of items in bounded sequences, and balancing between ranks."""
