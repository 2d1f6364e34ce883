"""Parts that encoders are made of: tokenizers, images, formats of documents and conversations."""
