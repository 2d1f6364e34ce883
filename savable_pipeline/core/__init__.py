"""The words that every folder uses: keyed random numbers, lanes, memory for batches; no file formats, no stages."""
