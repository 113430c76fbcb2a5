"""The web page's files: the manager serves them, and reports of jobs are one file made from them.

They need no build step: `index.html` names the style sheet and `main.js`, which imports the other modules.
"""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).parent / "static"
