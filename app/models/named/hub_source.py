"""Files of a repository on the Hugging Face Hub, in the cache that all its programs share.

`huggingface_hub` fetches them: it resumes, takes turns with other processes, and obeys its variables: HF_HOME,
HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT for a mirror, HF_HUB_OFFLINE.
"""

import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from llama_adapter.app.models.named.source import Check, DownloadError, Missing, http_client, require_space
from llama_adapter.llm.pieces.base import TOKENIZER_FILES
from llama_adapter.runtime.digests import file_digest
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.tensor_files.gguf_names import gguf_parts
from llama_adapter.runtime.terminal.stderr_lines import can_overwrite_lines

SCHEME: Final = "hf:"
CACHED: Final = "models--"  # begins the names of folders in the cache
_PART: Final = r"\w(?:[\w.-]*\w)?"  # of a repository's name
_ADDRESS = re.compile(rf"hf:(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^/]+))?(?:/(?P<file>.+))?", re.ASCII)
_MANIFEST: Final = "manifest.json"  # of a bundle, which has no other folders or formats
_OPEN_CLIP: Final = "open_clip_config.json"  # without it, the weights of open_clip would be taken for OpenAI's
# Beside the weights: sizes, tokenizer, ends of answers, chat template, preprocessing.
_BESIDE: Final = (
    "config.json",
    _OPEN_CLIP,
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
_SMALL: Final = 100_000_000  # bytes; no configuration or tokenizer has more
# The weights of one format, the first that a repository has, in the order of `weight_files`. An index lists its shards.
_WEIGHTS: Final = (
    ("model.safetensors",),
    ("model.safetensors.index.json", "model-*-of-*.safetensors"),
    ("[!.]*.safetensors",),
    ("pytorch_model.bin",),
    ("pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"),
    ("open_clip_pytorch_model.bin",),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSource:
    """A repository of the Hub, or one file of it."""

    repo: str  # OWNER/NAME
    revision: str | None = None  # a branch, tag or commit; None: main
    file: str | None = None  # None: the weights of a model and what is needed beside them
    needs_tokenizer: bool = True

    @classmethod
    def parse(cls, address: str, *, needs_tokenizer: bool = True) -> "HubSource":
        """`hf:OWNER/NAME[@REVISION][/FILE]`; a `/` in a revision is written as %2F. Raises UsageError."""
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise UsageError(
                f"`{address}` is no address on the Hugging Face Hub",
                hint="write hf:OWNER/NAME, hf:OWNER/NAME@REVISION or hf:OWNER/NAME/FILE",
            )
        revision = match["revision"] and unquote(match["revision"])
        return cls(repo=match["repo"], revision=revision, file=match["file"], needs_tokenizer=needs_tokenizer)

    @property
    def page(self) -> str:
        """The page of the repository, where access is asked for too."""
        return f"{_hub().constants.ENDPOINT}/{self.repo}"

    def folder(self) -> Path:
        """The cache of the Hub."""
        return Path(_hub().constants.HF_HUB_CACHE)

    @property
    def _files(self) -> list[str]:
        """The file, or all files of the split model that it is a part of."""
        return [] if self.file is None else [part.as_posix() for part in gguf_parts(Path(self.file))]

    @property
    def _beside(self) -> list[str]:
        """The config of a file of open_clip, which a repository may lack."""
        place = Path(self.file or "")
        is_open_clip = place.name.startswith(("open_clip_model.", "open_clip_pytorch"))
        return [place.with_name(_OPEN_CLIP).as_posix()] if is_open_clip else []

    @property
    def _configs(self) -> tuple[str, ...]:
        """Names of configs. A folder with a model has one of them; that of open_clip describes a tower only."""
        return ("config.json",) if self.needs_tokenizer else ("config.json", _OPEN_CLIP)

    def here(self) -> Path | None:
        """The file, or a folder with all that is needed, in the cache.

        Other programs may cache a file of open_clip without its config. Such a file counts offline, and if the
        repository is known to have no config.
        """
        if self.file is not None:
            is_settled = _hub().constants.HF_HUB_OFFLINE or None not in map(self._looked_up, self._beside)
            return self._cached(self.file) if is_settled and all(map(self._cached, self._files)) else None
        folders = (found.parent for found in map(self._cached, (_MANIFEST, *self._configs)) if found is not None)
        return next((folder for folder in folders if not self._missing_in(folder)), None)

    def _missing_in(self, folder: Path) -> list[str]:
        """What a folder lacks of a bundle, or of a model in Hugging Face's format, as far as its own files tell."""
        names = os.listdir(folder)
        if _MANIFEST in names:
            listed = _read(folder / _MANIFEST).get("files")
            return sorted(set(listed if isinstance(listed, dict) else ()) - set(names))
        if self.needs_tokenizer and not _matching(names, TOKENIZER_FILES):
            return ["tokenizer.json"]
        weights = next((found for kind in _WEIGHTS if (found := _matching(names, kind))), None)
        if weights is None:
            return ["model.safetensors"]
        index = next((name for name in weights if name.endswith(".index.json")), None)
        shards = {} if index is None else _read(folder / index).get("weight_map")
        return sorted(set(map(str, shards.values() if isinstance(shards, dict) else ())) - set(names))

    def _cached(self, name: str) -> Path | None:
        found = self._looked_up(name)
        return Path(found) if isinstance(found, str) else None

    def _looked_up(self, name: str) -> Any:
        """The path of a cached file; an object if the cache knows that the repository has none; else None."""
        return _hub().try_to_load_from_cache(self.repo, name, revision=self.revision)

    def missing(self) -> Missing:
        """What is to be fetched, as the Hub says. Raises DownloadError."""
        info, sizes = self._needed()
        card = getattr(info, "card_data", None) or {}
        return Missing(
            bytes=sum(size for name, size in sizes.items() if self._cached(name) is None),
            licence=str(card.get("license_name") or card.get("license") or ""),
            asks=bool(getattr(info, "gated", False)),
        )

    def _needed(self) -> tuple[Any, dict[str, int]]:
        """What the Hub says about the repository, and the sizes of the needed files in bytes, by name."""
        with self._errors():
            info = _hub().HfApi().model_info(self.repo, revision=self.revision, files_metadata=True)
        sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
        if absent := [name for name in self._files if name not in sizes]:
            raise DownloadError(f"{self.page} has no file `{absent[0]}`", hint=f"it has {_some(list(sizes))}")
        beside = [name for name in self._beside if name in sizes]
        return info, {name: sizes[name] for name in [*self._files, *beside] or self._choose(list(sizes))}

    def _choose(self, names: Sequence[str]) -> list[str]:
        """The files of a model that are needed, in one format. Raises DownloadError if there are no weights."""
        if _MANIFEST in names:
            return [name for name in names if "/" not in name and not name.startswith(".")]
        weights = next((found for kind in _WEIGHTS if (found := _matching(names, kind))), [])
        if not set(self._configs) & set(names) or not weights:
            form = f"{' or '.join(self._configs)} beside safetensors"
            raise DownloadError(
                f"{self.page} has no model of a form that is read here: {form}",
                hint=f"name one of its files as hf:{self.repo}/FILE; it has {_some(names)}",
            )
        return [*_matching(names, _BESIDE), *weights]

    def fetch(self, *, tell: Callable[[str], None]) -> Path:
        """Fetch what is missing; the path of the file or folder.

        Raises DownloadError, also for a file that has not the digest that the Hub states: that file is removed.
        """
        _, sizes = self._needed()
        missing = [name for name in sizes if self._cached(name) is None]
        require_space(self.folder(), sum(sizes[name] for name in missing))
        if not can_overwrite_lines():
            _hub().utils.disable_progress_bars()
        # Weights come last: a folder with weights is complete, also after an interruption.
        patterns = [glob.escape(name) for name in sizes]
        small = [glob.escape(name) for name, size in sizes.items() if size < _SMALL]
        with self._errors():
            _hub().snapshot_download(self.repo, revision=self.revision, allow_patterns=small or patterns)
            folder = Path(_hub().snapshot_download(self.repo, revision=self.revision, allow_patterns=patterns))
            for name in set(self._beside) - set(sizes):
                with suppress(_hub().errors.EntryNotFoundError):  # the cache remembers that there is none
                    _hub().hf_hub_download(self.repo, name, revision=self.revision)
        damaged = [one for one in _checks(folder / name for name in missing) if one.fault]
        for one in damaged:
            Path(os.path.realpath(one.path)).unlink(missing_ok=True)
        if damaged:
            names = [one.path.name for one in damaged]
            raise DownloadError(f"{_some(names)} of {self.page} arrived damaged: {damaged[0].fault}")
        return folder if self.file is None else folder / self.file

    def check(self) -> Iterator[Check]:
        """Compare the files in the cache with their digests, which are the names that the cache gives their content."""
        names = (self.file,) if self.file else (_MANIFEST, *self._configs)
        found = next(filter(None, map(self._cached, names)), None)
        if found is None:
            yield Check(path=self.folder() / (CACHED + self.repo.replace("/", "--")), fault="missing")
            return
        if self.file is not None:
            beside = filter(self._cached, self._beside)
            yield from _checks(found.with_name(Path(name).name) for name in (*self._files, *beside))
            return
        yield from (Check(path=found.parent / name, fault="missing") for name in self._missing_in(found.parent))
        folders = (found.parent, found.parent / "additional_chat_templates")
        yield from _checks(sorted(path for folder in folders if folder.is_dir() for path in folder.iterdir()))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns errors of `huggingface_hub` into those of this package."""
        errors = _hub().errors
        http_client()
        try:
            yield
        except errors.GatedRepoError:
            raise DownloadError(
                f"The authors of {self.repo} give access on request",
                hint=f"ask for it on {self.page}, then log in with `hf auth login`, or set HF_TOKEN",
            ) from None
        except errors.RepositoryNotFoundError:
            raise DownloadError(
                f"{self.page} does not exist, or is private",
                hint="check the name; for a private repository log in with `hf auth login`, or set HF_TOKEN",
            ) from None
        except errors.RevisionNotFoundError:
            raise DownloadError(f"{self.page} has no revision `{self.revision}`", hint="look at its history") from None
        except errors.OfflineModeIsEnabled:
            raise DownloadError(
                f"{self.repo} is to be fetched from the Hub, and HF_HUB_OFFLINE forbids it",
                hint="unset the variable, or copy the cache of a machine that has the files",
            ) from None
        except (errors.HTTPError, errors.LocalEntryNotFoundError) as error:  # the latter: the Hub was not reached
            raise self._failed(error.__cause__ or error) from error

    def _failed(self, error: BaseException) -> DownloadError:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            hint = f"ask for access on {self.page}, then log in with `hf auth login`, or set HF_TOKEN"
            return DownloadError(f"{self.page} was answered with status {status}: access is refused", hint=hint)
        reason = f"answered with status {status}" if status else str(error).splitlines()[0] or type(error).__name__
        return DownloadError(f"{self.repo} could not be fetched from the Hub: {reason}")


def _hub() -> Any:
    """The package `huggingface_hub`. Its telemetry is off, unless the user's environment says otherwise."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.utils

    return huggingface_hub


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    pairs = [(name, pattern) for name in names for pattern in patterns if name.count("/") == pattern.count("/")]
    return sorted({name for name, pattern in pairs if fnmatchcase(name, pattern)})


def _some(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)[:12]) + (", ..." if len(names) > 12 else "") if names else "none"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _checks(paths: Iterable[Path]) -> Iterator[Check]:
    """Compare files of the cache with their digests: SHA-256 of large files, Git's SHA-1 of small ones."""
    for path in paths:
        wanted = os.path.basename(os.path.realpath(path))
        if not path.is_file():
            fault = "" if path.is_dir() else "missing"
        elif re.fullmatch("[0-9a-f]{64}", wanted):
            fault = "" if file_digest(path) == wanted else "not the published SHA-256"
        elif re.fullmatch("[0-9a-f]{40}", wanted):
            content = path.read_bytes()
            found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
            fault = "" if found == wanted else "not the published Git digest"
        else:
            fault = ""  # a mirror that publishes no digest
        if fault or path.is_file():
            yield Check(path=path, fault=fault)
