"""Run a command beside the server of a config: `serve.py CONFIG FOLDER -- COMMAND …`.

The command finds the server in BASE_URL and its key in ACCURACY_GATE_API_KEY; log and start go to FOLDER.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from harness.config import load_config_file
from harness.config_lists import listed
from harness.errors import Position
from harness.placement import find_placement
from harness.servers.endpoint import Endpoint
from harness.serving import RunOptions, Serving


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    entry = listed(arguments.config.stem, load_config_file(arguments.config), Position(path=arguments.config))[0]
    placement = find_placement(None, serve_command=entry.config.serve_command)
    config = placement.place(entry).config
    with Serving(config, arguments.folder / "server.log", RunOptions(gpus=placement.gpus)) as serving:
        engine = serving.engine()
        assert isinstance(engine, Endpoint), "a server was started"
        where = {"BASE_URL": engine.base_url, "ACCURACY_GATE_API_KEY": engine.api_key or ""}
        return subprocess.run(arguments.command, env={**os.environ, **where}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
