"""The file for Ray's ``serve deploy``: ``fastgen serve MODEL --replicas N --print-config``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from fastgen.arguments import build
from fastgen.errors import InvalidArgumentError
from fastgen.options import LoadOptions
from fastgen.serving.arguments import sort_arguments
from fastgen.serving.replicas.settings import APP, WAIT_FOR_MACHINES, check_ports, settings_of, with_absolute_paths

# How long machines may take to join the cluster, if the file is not changed.
WAIT_FOR_MACHINES_S = 10.0
_HEAD = """\
# For Ray's command: serve deploy FILE. Deployed again with another num_replicas, it starts or ends replicas, and no
# request is lost. In place of num_replicas, autoscaling_config lets Ray Serve choose. Changed args start all replicas
# anew, some at a time. No API key stands here: name a file of keys (api_key_file), or set FASTGEN_API_KEY where the
# cluster's head runs. docs/scaling.md says more.
"""


def deploy_file(given: Mapping[str, Any]) -> str:
    """Returns the file that deploys what these arguments of ``fastgen.serve`` ask for, as YAML. Nothing is started.

    Raises ``InvalidArgumentError`` for arguments that a file cannot hold.
    """
    load_arguments, options = sort_arguments(given, reads_keys=False)  # their file may be on another machine
    build(LoadOptions, load_arguments)
    if options.replicas is None:
        raise InvalidArgumentError("--print-config needs --replicas: it writes the file that deploys them")
    check_ports(options)
    arguments = {name: value for name, value in sorted(with_absolute_paths(given).items()) if name != "address"}
    try:
        arguments = json.loads(json.dumps(arguments))
    except TypeError as error:
        raise InvalidArgumentError(f"an argument cannot be written to a file: {error}") from None
    application = {
        "name": APP,
        "import_path": "fastgen.serving.replicas.application:build",
        "route_prefix": None,  # clients come to the server's own port, and not through Ray
        "args": {**arguments, WAIT_FOR_MACHINES: WAIT_FOR_MACHINES_S},
        "deployments": [{"name": name, **settings} for name, settings in settings_of(options).items()],
    }
    text = yaml.safe_dump({"proxy_location": "Disabled", "applications": [application]}, sort_keys=False, width=120)
    return _HEAD + text
