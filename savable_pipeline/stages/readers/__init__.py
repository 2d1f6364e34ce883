"""First stages of a data path: readers, their orders, and joins."""
