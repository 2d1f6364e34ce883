"""Encoders ready to use and to copy: image captioning and packed language modelling."""
