"""The loop of all ranks but the first: they execute the first rank's commands until it stops."""

from typing import Any

from llama_adapter.llm.parallel.channel import Channel
from llama_adapter.llm.prefix import PictureTokens, Prefix
from llama_adapter.llm.runners.base import (
    DecodePlan,
    KeptTokens,
    MixedPlan,
    Plan,
    PrefillPlan,
    Runner,
    ScorePlan,
)


def follow(runner: Runner, channel: Channel) -> None:
    """Execute every command with this rank's share; returns after `stop`.

    Raises CollectiveError if another rank ends.
    """
    prefixes: dict[int, Prefix] = {}
    while (command := channel.receive())["do"] != "stop":
        for number in command["unused"]:
            prefixes.pop(number, None)
        _do(command, runner, channel, prefixes)


def _do(command: dict[str, Any], runner: Runner, channel: Channel, prefixes: dict[int, Prefix]) -> None:
    match command["do"]:
        case "project":
            projected = runner.project_prefix(channel.receive_numbers(command["shape"]))
            prefixes.update(zip(command["numbers"], projected, strict=True))
        case "stored":
            k_ANQH, v_ANQH = (channel.receive_numbers(command["shape"]).numpy() for _ in range(2))
            prefixes[command["number"]] = runner.stored_prefix(k_ANQH, v_ANQH)
        case "empty":
            prefixes[command["number"]] = runner.empty_prefix()
        case "move" | "clear" | "reset" | "warm_up" as method:
            getattr(runner, method)(**command["arguments"])
        case _:
            runner.run(_plan(command, channel, prefixes))


def _plan(command: dict[str, Any], channel: Channel, prefixes: dict[int, Prefix]) -> Plan:
    """The plan of a command. Its draws are None, because the first rank chooses the tokens for all."""
    match command["do"]:
        case "prefill":
            return PrefillPlan(
                draws=[None] * len(command["prompts"]),
                first_slot=command["first_slot"],
                **_asked(command, channel, prefixes),
            )
        case "decode":
            positions = command["positions"]
            return DecodePlan(list(range(len(positions))), positions, draws=[None] * len(positions))
        case "mixed":
            decode, prefill = (_plan(command[part], channel, prefixes) for part in ("decode", "prefill"))
            assert isinstance(decode, DecodePlan)
            assert isinstance(prefill, PrefillPlan)
            return MixedPlan(decode, prefill)
        case "score":
            return ScorePlan(continuations=command["continuations"], **_asked(command, channel, prefixes))
        case unknown:
            raise ValueError(f"no command `{unknown}`")


def _asked(command: dict[str, Any], channel: Channel, prefixes: dict[int, Prefix]) -> dict[str, Any]:
    """The prompts of a plan, and what belongs to them. The embeddings of pictures follow the command."""
    return {
        "rows": range(len(command["prompts"])),
        "prompts": command["prompts"],
        "prefixes": [prefixes[number] for number in command["prefixes"]],
        "pictures": [
            [
                PictureTokens(start=start, embeddings_SD=channel.receive_numbers(shape), digest=digest)
                for start, digest, shape in own
            ]
            for own in command["pictures"]
        ],
        "kept": [kept and KeptTokens(*kept) for kept in command["kept"]],
        "dropped": command["dropped"],
    }
