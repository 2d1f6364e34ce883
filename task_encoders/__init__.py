"""Encoders ready to use and to copy, one a file, and what they are built of.

classification       an image and its class, mixed in batches      square_crop    one square image, cropped
captioning           an image and its caption                      image_tiles    images of any shape as patches
contrastive          an image and a text that belong together      mixed_tokens   text and images in one sequence
chat                 conversations with images, answers learned    chat_template, conversation, document,
interleaved          documents with images in them                 sample_images  how data sets write those
language_modeling    text; with a prompt, or without               tokenizer, packing, field
"""
