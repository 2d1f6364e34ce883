"""Audio and video: from a seekable file to frames and samples, exactly, by one thread.

    container    opens a file, and decodes one stream of it from a time on
    video        `Video`: frames by time or by index
    audio        `Audio`: samples by time
    media_info   what the headers say, and what is wrong with a file

The files are of any kind that can be read and sought: parts of shards, files beside a table, objects behind a URL.
PyAV, of the extra `media`, is imported when the first of them is opened.
"""
