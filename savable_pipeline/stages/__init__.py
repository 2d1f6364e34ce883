"""The protocol of stages, and those between the readers and the batch: buffers, encoding, batching."""
