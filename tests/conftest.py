"""What every test takes for granted."""

import signal

# A shell starts what it runs behind `&` with Ctrl-C ignored, and programs started here would
# inherit that: the tests that send it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
