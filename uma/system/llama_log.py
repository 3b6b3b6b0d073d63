"""What llama.cpp prints of a Mac's GPU when it starts."""

import re


def working_set_mb(text: str) -> float | None:
    """The ``recommendedMaxWorkingSetSize`` of a log, in the log's own "MB".

    Builds until about November 2023 print MiB, later ones 10^6 bytes (ggml-org/llama.cpp, pull
    request 2011 against today's ggml-metal), some with a decimal comma.

    >>> working_set_mb("ggml_metal_init: recommendedMaxWorkingSetSize  = 73728,00 MB")
    73728.0
    """
    match = re.search(
        r"recommendedMaxWorkingSetSize\s*=\s*([0-9]{1,12}(?:[.,][0-9]{1,6})?) MB", text
    )
    return float(match[1].replace(",", ".")) if match else None
