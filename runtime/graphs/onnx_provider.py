"""onnxruntime's execution providers: the provider for each device, and its options."""

import configparser
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from llama_adapter.runtime.device_names import split_device
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.graphs.known_names import known_names
from llama_adapter.runtime.settings.setting import meant, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class OnnxProvider:
    """The execution provider that runs an ONNX graph in onnxruntime. It can be pickled and printed."""

    name: str = "CPUExecutionProvider"
    options: Mapping[str, str] = field(default_factory=dict)  # options of the provider
    session_entries: Mapping[str, str] = field(default_factory=dict)  # onnxruntime's session configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of provider, according to its documentation."""

    name: str
    packages: str  # arguments of pip
    options: frozenset[str]


CPU: Final = OnnxProvider()


_NAMES: Final = known_names("onnxruntime")
# Providers by kind of device. The wheels exclude each other, because all install a module `onnxruntime`.
KINDS: Final[Mapping[str, Kind]] = {
    "cpu": Kind(name=CPU.name, packages="onnxruntime", options=_NAMES["cpu"]),
    "cuda": Kind(name="CUDAExecutionProvider", packages="onnxruntime-gpu", options=_NAMES["cuda"]),
    "npu": Kind(name="CANNExecutionProvider", packages="onnxruntime-cann 'numpy<2'", options=_NAMES["npu"]),
}
BY_NAME: Final = {kind.name: kind for kind in KINDS.values()}
SESSION: Final = "session"  # the section with session configuration entries


def provider_of_device(device: str, *, options: Iterable[str] = (), config: str | None = None) -> OnnxProvider:
    """The provider for a device, with its options.

    Parameters:
        device: `cpu`, `cuda`, `cuda:1`, `npu:0`, ...
        options: texts such as `npu_mem_limit=8589934592`, which take precedence over the file. A name with a dot is a
            session configuration entry: `session.disable_cpu_ep_fallback=1`.
        config: path of an INI file. The section with the provider's name has its options, `[session]` has session
            configuration entries. Sections of other providers and programs are ignored.

    Raises ValueError for a malformed device or option, and UsageError for a file that cannot be used and for names that
    the provider does not know.
    """
    name, device_id = split_device(device)
    kind = KINDS[name]
    given = {} if config is None else _read_config(config, provider=kind.name)
    own, entries = given.get(kind.name, {}), given.get(SESSION, {})
    for name, value in map(split_option, options):
        (entries if "." in name else own)[name] = value
    _check(own, known=kind.options, what=f"option of {kind.name}")
    _check(entries, known=_NAMES[SESSION], what="session configuration entry of onnxruntime")
    if device_id is not None and own.setdefault("device_id", str(device_id)) != str(device_id):
        raise UsageError(
            f"The device is `{device}`, and the option device_id is {own['device_id']}", hint="leave device_id out"
        )
    return OnnxProvider(name=kind.name, options=own, session_entries=entries)


def split_option(text: str) -> tuple[str, str]:
    """`key=value` -> key, value. Raises ValueError."""
    name, equals, value = text.partition("=")
    if not (name.strip() and equals):
        raise ValueError(f"provider_option wants key=value, got {text!r}")
    return name.strip(), value.strip()


def _read_config(path: str, *, provider: str) -> dict[str, dict[str, str]]:
    """The sections of an INI file. Raises UsageError if it has no section for the provider or the session."""
    parser = configparser.ConfigParser(
        interpolation=None, delimiters=("=",), inline_comment_prefixes=("#", ";"), default_section=""
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file)
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise UsageError(f"The provider configuration `{path}` cannot be read: {reason}") from None
    ours = (*BY_NAME, SESSION)
    for section in parser.sections():
        if section not in ours and (similar := nearest(section.lower(), ours)) is not None:
            raise UsageError(f"`{path}` has a section [{section}]", hint=f"[{similar}] may be meant")
    if not {provider, SESSION} & {*parser.sections()}:
        sections = ", ".join(f"[{name}]" for name in parser.sections()) or "none"
        raise UsageError(
            f"`{path}` has neither a section [{provider}] nor [{SESSION}]; its sections: {sections}",
            hint="name the device whose provider it configures",
        )
    return {section: dict(parser[section]) for section in (provider, SESSION) if section in parser}


def _check(given: Mapping[str, str], *, known: frozenset[str], what: str) -> None:
    """Raise UsageError for an unknown name."""
    for name in given:
        if name not in known:
            hint = meant(name.lower(), sorted(known)) or f"known: {', '.join(sorted(known)) or 'none'}"
            raise UsageError(f"`{name}` is no {what}", hint=hint)
