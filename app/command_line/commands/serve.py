"""`serve` and `web`."""

import argparse
from functools import partial
from typing import Any

from llama_adapter.app.command_line.flags import add_flags, command, fields_of
from llama_adapter.app.command_line.parser import Parser
from llama_adapter.app.command_line.values import settings, spec_from
from llama_adapter.runtime.errors import UsageError


def add_serving(commands: Any) -> None:
    """Add `serve` and `web`."""
    for name, has_page, port in (("serve", False, 8000), ("web", True, 7860)):
        run, declare = partial(_serve, has_page=has_page), partial(_declare, port=port, has_page=has_page)
        command(commands, name, run, declare=declare)


def _declare(parser: Parser, *, port: int, has_page: bool) -> None:
    from llama_adapter.app.serving.online.types import ServiceLimits

    defaults = fields_of(ServiceLimits()) | {"port": port}
    add_flags(parser, "server", "page" if has_page else "replicas", "model", defaults=defaults)


def _serve(options: argparse.Namespace, *, has_page: bool) -> int:
    spec = spec_from(options, sees_pictures=False)  # LLaMA without an adapter can be served too
    from llama_adapter.app.command_line.commands.run_server import ServeJob, run_serve
    from llama_adapter.app.serving.online.types import ServiceLimits

    limits = settings(ServiceLimits, vars(options))
    more = {} if has_page else _replicas(options)
    return run_serve(
        settings(ServeJob, {**vars(options), "spec": spec, "limits": limits, "has_page": has_page, **more})
    )


def _replicas(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a job that place the model on a cluster; empty if the model is in this process."""
    from llama_adapter.app.jobs.clusters.cluster import RayOptions
    from llama_adapter.app.serving.replicas.types import DeploymentSettings

    given = {name: vars(options)[name] for name in ("replicas", "max_replicas") if vars(options)[name] is not None}
    if options.engine != "ray":
        if given or options.ray_address is not None:
            raise UsageError(
                "--replicas, --max-replicas and --ray-address go with --engine ray, which is missing",
                hint="one process answers without it",
            )
        return {}
    deployment = {**given, "graceful_shutdown_timeout_s": options.drain_s, "effective": options.effective}
    ray = {"address": options.ray_address, "effective": options.effective}
    return {
        "deployment": settings(DeploymentSettings, deployment),
        "ray": settings(RayOptions, ray, shown={"address": "--ray-address"}),
    }
