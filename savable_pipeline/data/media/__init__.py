"""Audio and video: exact frames and samples of a seekable file, by one thread.

    container    opens a file, and decodes one of its streams from a time
    video        `Video`: frames by time or by index
    audio        `Audio`: samples by time
    media_info   facts in the headers, and errors of a file

A file is any object that can be read and sought: a part of a shard, a file named by a table, or a remote object. PyAV,
of the extra `media`, is imported when the first file is opened.
"""
