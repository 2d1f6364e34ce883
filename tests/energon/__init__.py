"""Energon's encoders on our stages."""
