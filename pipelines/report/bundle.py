"""The charting library that a page contains: Vega, Vega-Lite and Vega-Embed, bundled by vl-convert.

Bundling takes about five seconds, so the result is kept in this user's cache.
"""

from __future__ import annotations

import contextlib
import functools
import re
from importlib import metadata

from pipelines.errors import AmagoError
from pipelines.files.atomic import write_atomically
from pipelines.files.user_cache import cache_home

_SNIPPET = "window.vegaEmbed = vegaEmbed; window.vega = vega;"
_PACKAGE = "vl-convert-python"


@functools.cache
def charting_script() -> str:
    """Return the JavaScript that defines `vegaEmbed` and `vega`; it contains no end of a <script> element."""
    path = cache_home() / f"charting-{metadata.version(_PACKAGE)}.js"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    import vl_convert

    # In a JavaScript string "<\/" and "\x3c" mean the same as what would end a <script> element, or confuse it.
    script = re.sub("</(?=script)", r"<\\/", vl_convert.javascript_bundle(_SNIPPET), flags=re.IGNORECASE)
    script = re.sub("<(?=!--|script)", r"\\x3c", script, flags=re.IGNORECASE)
    with contextlib.suppress(AmagoError):  # a cache that cannot be written costs the next report five seconds
        write_atomically(path, script)
    return script
