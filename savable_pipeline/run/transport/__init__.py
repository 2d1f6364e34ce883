"""Passes bytes and file descriptors between two processes; knows neither samples nor stages."""
