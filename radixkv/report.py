"""A cache as one HTML file that needs nothing from elsewhere: what `PrefixCache.report` writes.

The page is a template of four parts in `report_page/`. The data lies in it as JSON, in a block that a browser does not run, and its script
sets text as text only. A Content-Security-Policy in the page lets its own script and style run, by their digests, and nothing else: no
other script, wherever it comes from, and no request to anywhere.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.kv_file import replacing
from radixkv.readable import decoder_of
from radixkv.report_data import copy_cache, report_data

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache

SCRIPTS = ("data.js", "charts.js", "tree.js", "search.js", "page.js")


def write_report(cache: PrefixCache, path: str | os.PathLike[str], tokenizer: Any, max_nodes: int) -> Path:
    """Writes the file; see `PrefixCache.report`."""
    if type(max_nodes) is not int or max_nodes < 1:
        raise ValueError(f"report: max_nodes must be an int of at least 1, got {max_nodes!r}")
    decoder_of("report", tokenizer)
    path = Path(path)
    try:
        with replacing(path, "report") as file:
            file.write(render_page(report_data(copy_cache(cache), tokenizer, max_nodes)).encode())
    except PermissionError as error:
        raise PermissionError(f"report: {path} cannot be written: {error.strerror}; choose a folder that can") from error
    return path


def render_page(data: dict[str, Any]) -> str:
    """The page that shows what `report_data` returned."""
    folder = files("radixkv") / "report_page"
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = "".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    policy = f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; base-uri 'none'; form-action 'none'"
    parts = {"policy": policy, "style": style, "script": script, "data": embed_json(data)}
    # In one pass: what is put in is not searched for names again.
    return re.sub(r"%%(\w+)%%", lambda found: parts[found[1]], (folder / "page.html").read_text(encoding="utf-8"))


def embed_json(data: Any) -> str:
    """JSON in ASCII without <, > and &, so that no text in it can end the block in which it stands."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
