"""Runs lanes, in the trainer's process or in worker processes that may die."""
