"""docs/service.md of docs/service.json: load, promises under load, and refused requests. Measures nothing."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts.page_parts import company

Figures = Mapping[str, Any]

INTRODUCTION = """\
# The service under load

`llama-adapter serve` with the embedded model, asked over loopback. This page is made of [service.json](service.json) by
`python -m scripts.bench_service`, `python -m scripts.attack_service` and `python -m scripts.refused_inputs`, each its
own part.
"""

LOAD = """\
## Requests of many clients

Clients that ask for captions of the sample pictures, each a request at a time over a connection of its own, as a
stream. **New** pictures are read and encoded: every request has bytes that the server has not seen. **Known** ones were
asked about before, so that their encoding is used again. One client is the same requests one at a time. Rounds take
turns, a new and a known one for each number of clients; rates are medians of {rounds} rounds of {seconds:g} s,
with the least and the greatest behind them, times are of all requests together, from sending a request on.
**In process** is the captioner without a server, {num_pictures} pictures at a call and {batch_size} at a time.
"""

NOT_MEASURED = "Not measured yet."


def as_markdown(content: Figures) -> str:
    """The page; a part that was not measured says so."""
    lines = [INTRODUCTION]
    load = content.get("load")
    lines += _load(load) if load else ["## Requests of many clients", "", NOT_MEASURED, ""]
    attack = content.get("attack")
    lines += _attack(attack) if attack else ["## Slow pictures", "", NOT_MEASURED, ""]
    refusals = content.get("refusals")
    lines += _refusals(refusals) if refusals else ["## Requests that are refused", "", NOT_MEASURED, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _load(load: Figures) -> Iterator[str]:
    yield LOAD.format(**load)
    yield (
        "| pictures | clients | requests/s | rounds | first token, p50 | p95 | whole answer, p50 | p95 "
        "| server's cores | clients' |"
    )
    yield "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for row in load["rows"]:
        first, total = row["first_token_ms"], row["total_ms"]
        yield (
            f"| {row['pictures']} | {row['clients']} | {row['requests_per_s']:.1f} | {_spread(row['rounds'])} "
            f"| {first['p50']:.0f} ms | {first['p95']:.0f} ms | {total['p50']:.0f} ms | {total['p95']:.0f} ms "
            f"| {row['server_cpu_share']:.2f} | {row['client_cpu_share']:.2f} |"
        )
    alone = load["in_process"]
    yield f"| in process | - | {alone['pictures_per_s']:.1f} | {_spread(alone['rounds'])} | | | | | | |"
    yield ""
    yield from _gains(load["rows"])
    yield _tally(load["rows"])
    yield ""
    yield from company(load["circumstances"])
    yield from _equality(load["equality"])
    yield from _overload(load["overload"])
    yield from _end(load["end"])
    yield f"Circumstances: {_circumstances(load['circumstances'])}"
    yield ""


def _tally(rows: Sequence[Figures]) -> str:
    wrong = sum(row["num_wrong"] for row in rows)
    others = sum(sum(row["others"].values()) for row in rows)
    requests = sum(row["requests"] for row in rows) + others
    share = max(row["client_cpu_share"] for row in rows)
    return (
        f"Of {requests:,} requests {others:,} were not answered, and {wrong:,} answers were not the captioner's own. "
        f"All clients together took at most {share:.2f} of a core."
    )


def _gains(rows: Sequence[Figures]) -> Iterator[str]:
    for pictures in dict.fromkeys(row["pictures"] for row in rows):
        rates = {row["clients"]: row["requests_per_s"] for row in rows if row["pictures"] == pictures}
        alone = rates.pop(1, None)
        if alone and rates:
            told = ", ".join(f"{rate / alone:.2f} times with {clients} clients" for clients, rate in rates.items())
            yield f"Over one request at a time, pictures {pictures}: {told}."
    yield ""


def _equality(rows: Sequence[Figures]) -> Iterator[str]:
    yield "## Answers are those of the command line"
    yield ""
    yield "Text, finish and number of tokens beside `Captioner.generate`'s, one picture at a time in another process."
    yield ""
    yield "| how | requests | clients at once | different |"
    yield "| --- | ---: | ---: | ---: |"
    for row in rows:
        yield f"| {row['how']} | {row['requests']} | {row['clients']} | {row['different']} |"
    yield ""


def _overload(row: Figures) -> Iterator[str]:
    refused = {name: number for name, number in row["outcomes"].items() if name.startswith("refused")}
    rest = {name: number for name, number in row["outcomes"].items() if name not in refused and name != "answered"}
    yield "## Ten times too many"
    yield ""
    yield (
        f"{row['requests']:,} requests at the same moment, each of a picture and over a connection of its own: "
        f"{row['requests'] // row['holds']} times the {row['holds']} that the slots and one client's share of the "
        "queue hold."
    )
    yield ""
    yield "| what became of them | requests | |"
    yield "| --- | ---: | --- |"
    answered = row["outcomes"].get("answered", 0)
    yield f"| answered | {answered:,} | wrong: {row['num_wrong']}{_within(row['answered_ms'])} |"
    for name, number in sorted(refused.items()):
        without = f"without Retry-After: {row['num_without_retry_after']}{_within(row['refused_ms'])}"
        yield f"| {name} | {number:,} | {without} |"
    yield f"| hung, broken off, no connection | {sum(rest.values()):,} | |"
    yield ""
    yield f"All was over after {row['seconds']:.1f} s. Retry-After said {_told_seconds(row['retry_after_s'])}."
    yield ""


def _end(row: Figures) -> Iterator[str]:
    yield "## SIGTERM under load"
    yield ""
    yield (
        f"{row['clients']} clients asked over and over when the signal came, until they got no connection any more. "
        f"The server ended after {row['drain_s']:.2f} s with exit code {row['exit_code']}. "
        f"**Lost: {row['num_lost']}**; wrong answers: {row['num_wrong']}. Not accepted is a connection that was "
        "refused, or closed before a byte of an answer."
    )
    yield ""
    yield "| requests | what became of them |"
    yield "| --- | --- |"
    yield f"| under way at the signal: {sum(row['across'].values())} | {_told(row['across'])} |"
    yield f"| sent after it: {sum(row['after'].values())} | {_told(row['after'])} |"
    yield ""


ATTACK = """\
## Slow pictures

Pictures of {largest_mb:.0f} MB or less that take a decoder minutes or gigabytes of memory. For each kind, a server of
its own answers {good} clients as above (new pictures) for {calm_s:g} s. Then {attackers} other clients send a slow
picture each, while the good clients go on for {attack_s:g} s. p99 is the time of a good client's whole answer. Memory
is that of the server and its reading processes: before, and the most during the attack. At the end the slow clients
hang up, and the server gets SIGTERM.
"""


def _attack(attack: Figures) -> Iterator[str]:
    yield ATTACK.format(**attack)
    yield (
        "| slow pictures | p99 before | p99 under attack | good requests/s | not answered | slow pictures got | memory "
        "| SIGTERM |"
    )
    yield "| --- | ---: | ---: | --- | ---: | --- | --- | ---: |"
    for row in attack["rows"]:
        yield (
            f"| {row['kind']} | {row['calm']['p99_ms']:,.0f} ms | {row['under_attack']['p99_ms']:,.0f} ms "
            f"| {row['calm']['requests_per_s']:.0f}, then {row['under_attack']['requests_per_s']:.0f} "
            f"| {row['under_attack']['num_failed']} | {_told(row['slow'])} "
            f"| {row['memory_mb']:.0f}, then {row['most_memory_mb']:.0f} MB | {_ended(row)} |"
        )
    yield ""
    yield from company(attack["circumstances"])
    yield f"Circumstances: {_circumstances(attack['circumstances'])}"
    yield ""


def _ended(row: Figures) -> str:
    return f"not after {row['end_s']:.0f} s" if row["exit_code"] is None else f"{row['end_s']:.1f} s"


REFUSED = """\
## Requests that are refused

One after the other at one server, each over a connection of its own. Time is that of the whole request as its client
saw it, sending included. Growth is how far the server's resident memory rose above what it was before the request, and
what was left of that a moment later. It was {resident_mb:.0f} MB before the first request and
{resident_after_mb:.0f} MB after the last; questions about all sample pictures were answered before and after. For
redirects and names, this server has names of its own and takes 127.0.0.1 for a public address.
"""


def _refusals(refusals: Figures) -> Iterator[str]:
    yield REFUSED.format(**refusals)
    yield "| request | status | code | time | growth | left |"
    yield "| --- | ---: | --- | ---: | ---: | ---: |"
    for row in refusals["rows"]:
        code = f"`{row['code']}`" if row["code"] else ""
        mark = "" if row["is_right"] else " **not as it should be**"
        yield (
            f"| {row['name']} | {row['status']}{mark} | {code} | {row['ms']:,.0f} ms "
            f"| {row['peak_mb']:.1f} MB | {row['left_mb']:.1f} MB |"
        )
    yield ""
    yield f"Circumstances: {_circumstances(refusals['circumstances'])}"
    yield ""


def _within(times: Mapping[str, float] | None) -> str:
    return "" if times is None else f"; after {times['p50']:,.0f} ms (p50), {times['p95']:,.0f} ms (p95)"


def _told(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')}: {number:,}" for name, number in sorted(outcomes.items())) or "none"


def _told_seconds(seconds: Sequence[int]) -> str:
    if not seconds:
        return "nothing"
    return f"{seconds[0]} s" if len(seconds) == 1 else f"{seconds[0]} to {seconds[-1]} s"


def _spread(rates: Sequence[float]) -> str:
    return f"{min(rates):.1f} to {max(rates):.1f}"


def _circumstances(about: Figures) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    load = about["load_before"]
    return (
        f"{about['cpu']}, {about['num_cpus']} cores, OMP_NUM_THREADS={about['omp_num_threads']} for the server, "
        f"load before {load[0] if load else 'unknown'}; {versions}; commit {about['commit']}; {about['time']}."
    )
