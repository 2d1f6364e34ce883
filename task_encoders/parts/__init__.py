"""Parts of encoders: tokenizers, images, formats of documents and conversations."""
