"""Audio and video: exact frames and samples of a seekable file, by one thread.

    container    opens a file, and decodes one of its streams from a time
    video        `Video`: frames by time or by index
    audio        `Audio`: samples by time
    media_info   facts in the headers, and errors of a file

The files are any that can be read and sought: parts of shards, files named by a table, remote objects. PyAV, of the
extra `media`, is imported when the first of them is opened.
"""
