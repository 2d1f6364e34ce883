"""`StatusPage`: the stack of a hanging worker is read only once the worker has written all of it."""

from __future__ import annotations

import os

from savable_pipeline.run.transport.status_page import StatusPage

LISTENER = 'Thread 0x1 (most recent call first):\n  File "a.py", line 5 in listen\n\n'
WORKER = (
    'Current thread 0x2 (most recent call first):\n  File "b.py", line 7 in hang\n  File "c.py", line 9 in answer\n'
)


def test_a_stack_that_is_half_written_is_read_as_a_whole_later() -> None:
    page = StatusPage.create()
    try:
        end = os.fstat(page.descriptor).st_size
        os.pwrite(page.descriptor, LISTENER.encode(), end)
        assert not page.has_stack("answer")
        os.pwrite(page.descriptor, WORKER.encode(), end + len(LISTENER))
        expected = 'Stack, the innermost call first:\n  File "b.py", line 7 in hang'
        assert page.has_stack("answer")
        assert page.new_stack("answer") == expected
        assert page.new_stack("answer") == ""  # it was read
    finally:
        page.close()


def test_stacks_of_a_worker_without_the_function_are_read_unchanged() -> None:
    page = StatusPage.create()
    try:
        os.pwrite(page.descriptor, LISTENER.encode(), os.fstat(page.descriptor).st_size)
        assert not page.has_stack("answer")
        assert page.new_stack("answer") == LISTENER
    finally:
        page.close()
