"""What every test takes for granted."""

import os
import signal
import tempfile

# A run takes a lock in the state folder: neither a user's own training nor a second run of the
# tests may meet it.
_STATE = tempfile.TemporaryDirectory(prefix="uma-tests-")
os.environ.setdefault("UMA_STATE_DIR", _STATE.name)

# A shell starts what it runs behind `&` with Ctrl-C ignored, and programs started here would
# inherit that: the tests that send it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
