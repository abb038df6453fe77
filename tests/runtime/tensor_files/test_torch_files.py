"""torch's files are read bit for bit without torch's readers.

Hostile files cost little time and memory and run no code.
"""

import io
import os
import pickle
import pickletools
import shutil
import struct
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.tensor_files.files import check_dense, count_blocks, read_tensor_file
from llama_adapter.runtime.tensor_files.pickles import read_pickle
from tests.fakes.hostile_archive import write_hostile_archive

GOLDEN = Path(__file__).parents[2] / "golden"
CLIP = GOLDEN / "CLIP" / "tiny-vit-torchscript.pt"
pytestmark = pytest.mark.filterwarnings(  # torch's warnings about TorchScript
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning"
)


def by_torch(path: Path) -> dict[str, Tensor]:
    """The tensors that torch itself reads; used only for files made in these tests."""
    return dict(torch.jit.load(str(path), map_location="cpu").state_dict())  # type: ignore[no-untyped-call]


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Assert equal bits, dtypes and shapes."""
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(bits(found[key]), bits(tensor)), key


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Block(nn.Module):
    """Stores its tensors like a block of OpenAI's CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.randn(12, 4))
        self.out_proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(x) + torch.nn.functional.linear(x, self.in_proj_weight)[..., :4]


class Clip(nn.Module):
    """Has parameters, buffers, nested modules, shared storages, views, numbers and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.resblocks = nn.Sequential(Block(), Block())
        whole = torch.randn(6, 8)
        self.proj = nn.Parameter(whole[:, ::2])
        self.tied = nn.Parameter(whole[2:])
        self.shared = self.resblocks[0]
        self.register_buffer("input_resolution", torch.tensor(224))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).triu())

    def forward(self, x: Tensor) -> Tensor:
        return self.resblocks(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]) + self.proj.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript_archives_are_read_as_torch_reads_them(tmp_path: Path, dtype: torch.dtype, how: str) -> None:
    module = Clip().to(dtype).eval()
    made: Any = torch.jit.script(module) if how == "script" else torch.jit.trace(module, torch.ones(1, 4, dtype=dtype))
    made.save(tmp_path / "clip.pt")

    for path in (tmp_path / "clip.pt", CLIP):
        assert_equal(read_tensor_file(path, torchscript=True).tensors, by_torch(path))


@pytest.mark.parametrize("name", ["BIAS-TINY", "LORA-BIAS-TINY", "CAPTION-TINY", "training-checkpoint-0"])
@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "before torch 1.6"])
def test_files_of_torch_save_are_read_as_torch_reads_them(tmp_path: Path, name: str, zipped: bool) -> None:
    path = GOLDEN / "adapters" / f"{name}.pth"
    with torch.serialization.safe_globals([Namespace]):
        content = torch.load(path, weights_only=True)
    if not zipped:
        torch.save(content, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
        path = tmp_path / "old.pth"

    file = read_tensor_file(path)

    assert_equal(file.tensors, content["model"])
    assert file.config == content.get("config", {})


def test_harmless_objects_beside_tensors_are_ignored(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
    parameter.is_model_parallel = True  # type: ignore[attr-defined]
    beside = {"size": torch.Size([1]), "kind": torch.float16, "set": {1}, "bytes": b"\0", "device": torch.device("cpu")}
    torch.save({"model": OrderedDict(a=parameter, b=torch.ones(3)), **beside}, tmp_path / "x.pt")

    assert_equal(read_tensor_file(tmp_path / "x.pt").tensors, {"a": parameter.detach(), "b": torch.ones(3)})


def test_archives_packed_again_are_read_and_those_in_the_other_byte_order_refused(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5), "b": torch.arange(3), "c": torch.randn(4).half()}
    torch.save(tensors, tmp_path / "x.pt")
    rewrite(tmp_path / "x.pt", tmp_path / "y.pt", lambda name, data: data)
    assert_equal(read_tensor_file(tmp_path / "y.pt").tensors, tensors)

    rewrite(tmp_path / "x.pt", tmp_path / "z.pt", lambda name, data: b"big" if "byteorder" in name else data)
    with pytest.raises(CheckpointError, match="in another byte order than this machine's") as caught:
        read_tensor_file(tmp_path / "z.pt")
    assert caught.value.hint == "save it again as safetensors, or with torch on a machine of this byte order"

    rewrite(tmp_path / "x.pt", tmp_path / "odd.pt", lambda name, data: b"odd" if "byteorder" in name else data)
    with pytest.raises(CheckpointError, match=r"damaged, .*\(an unknown byte order\)"):
        read_tensor_file(tmp_path / "odd.pt")


def rewrite(
    source: Path, target: Path, change: Callable[[str, bytes], bytes], *, method: int = zipfile.ZIP_STORED
) -> None:
    """Copy the archive with changed bytes in its members, which are then no longer aligned."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


def test_tensors_are_mapped_from_the_file(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(10_000_000)}, tmp_path / "x.pt")
    before = begin_peak()
    tensor = read_tensor_file(tmp_path / "x.pt").tensors["a"]

    assert peak() - before < 10e6
    assert not tensor[::1000].any()


def begin_peak() -> int:
    """Resident memory in bytes. The peak is counted from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The largest resident memory since `begin_peak`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def test_code_of_an_archive_is_not_run(tmp_path: Path) -> None:
    write_hostile_archive(tmp_path / "clip.pt", target=tmp_path / "written")

    with pytest.raises(CheckpointError, match=r"Python objects .*\(`__torch__\.[\w.]*WritesAFile`\)"):
        read_tensor_file(tmp_path / "clip.pt", torchscript=True)

    assert not (tmp_path / "written").exists()
    by_torch(tmp_path / "clip.pt")
    assert (tmp_path / "written").exists()  # this shows that the archive works


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02c__torch__.torch.classes.quantized\nLinearPackedParamsBase\n)\x81.",
        b"\x80\x02c__torch__.a b\nc\n)\x81.",
        b"\x80\x02c__torch__.a\nB\n)\x81}K\x01K\x02sb.",
        b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
        b"\x80\x02c__builtin__\neval\n.",
        b"\x80\x02ctorch.jit\nload\n.",
    ],
)
def test_other_objects_are_refused_by_name(content: bytes, tmp_path: Path) -> None:
    rewrite(CLIP, tmp_path / "clip.pt", lambda name, data: content if name.endswith("/data.pkl") else data)
    name = content.split(b"c", 1)[1].split(b"\n")[0].decode()
    with pytest.raises(CheckpointError, match=rf"Python objects .*\(`{name.replace('.', '[.]')}"):
        read_tensor_file(tmp_path / "clip.pt", torchscript=True)


def pickle_parts(*values: object) -> bytes:
    """The opcodes that push plain values, without memo entries, so that they can be combined."""
    return b"".join(map(pickle_part, values))


def pickle_part(value: object) -> bytes:
    if isinstance(value, str):  # a shortcut, because there are many and pickletools is slow
        text = value.encode()
        return b"X" + struct.pack("<I", len(text)) + text
    return pickletools.optimize(pickle.dumps(value, protocol=2))[2:-1]


def tensor(key: str, shape: tuple[int, ...], stride: tuple[int, ...], *, offset: int = 0, numel: int = 4) -> bytes:
    """The opcodes that push a tensor with this header."""
    storage = b"(" + pickle_parts("storage") + b"ctorch\nFloatStorage\n" + pickle_parts(key, "cpu", numel) + b"tQ"
    numbers = pickle_parts(offset, shape, stride)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + numbers + b"\x89}tR"


def header(**numbers: Any) -> bytes:
    """The pickle of {"a": a tensor with this header}."""
    return b"\x80\x02}" + pickle_parts("a") + tensor("0", **numbers) + b"s."


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"x": 1}, protocol=4),
        header(shape=(50_000, 37_500), stride=(0, 0)),
        header(shape=(2, 4), stride=(0, 1)),
        header(shape=(5,), stride=(1,)),
        header(shape=(4,), stride=(1,), offset=1),
        header(shape=(4,), stride=(1,), numel=1 << 40),
        header(shape=(1 << 62, 1 << 62), stride=(0, 0)),
        header(shape=(2,), stride=(-1,)),
        header(shape=(0, 1 << 47), stride=(1, 1), offset=1 << 47),
        b"\x80\x02" + b"r\xff\xff\xff\xff" + b"}.",
        b"\x80\x02X\xff\xff\xff\xffabc.",
        b"\x80\x02}(K\x01tK\x02s.",
        b"",
    ],
)
def test_headers_that_do_not_fit_the_file_are_refused(content: bytes, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(4)}, tmp_path / "x.pt")
    rewrite(tmp_path / "x.pt", tmp_path / "y.pt", lambda name, data: content if name.endswith("/data.pkl") else data)
    with pytest.raises(CheckpointError, match="cut short, damaged, or no tensor file"):
        read_tensor_file(tmp_path / "y.pt")


def test_many_views_of_the_same_numbers_are_refused(tmp_path: Path) -> None:
    one = torch.zeros(1 << 20)
    torch.save({str(i): one for i in range(1000)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"damaged, .*\(tensors of 4,194,304,000 bytes\)"):
        read_tensor_file(tmp_path / "x.pt")


def test_members_that_share_their_bytes_are_refused_before_they_are_copied(tmp_path: Path) -> None:
    num_members, num_bytes = 500, 1 << 20
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", many_headers(num_members))
        archive.writestr("x/data/0", bytes(num_bytes))
        one = archive.filelist[-1]
        for i in range(1, num_members):
            entry = zipfile.ZipInfo(f"x/data/{i}")
            entry.CRC, entry.compress_size, entry.file_size = one.CRC, one.compress_size, one.file_size
            entry.header_offset = one.header_offset
            archive.filelist.append(entry)
        start = one.header_offset + 30 + len(one.filename)
        assert start % 4, "the numbers would be aligned"
    before = begin_peak()

    with pytest.raises(CheckpointError, match=rf"\(storages of {num_members * num_bytes:,} bytes\)"):
        read_tensor_file(tmp_path / "x.pt")

    assert peak() - before < 100e6


def many_headers(number: int) -> bytes:
    """The pickle of a dictionary of tensors with one number each, all in separate storages."""
    items = (pickle_parts(key) + tensor(key, (1,), (1,), numel=1) + b"s" for key in map(str, range(number)))
    return b"\x80\x02}" + b"".join(items) + b"."


def modules_with_attributes(number: int, attributes: bytes) -> bytes:
    """The pickle of a module that holds `number` modules with the same attributes."""
    inner = b"".join(pickle_parts(str(i)) + b"c__torch__.a\nB\n)\x81h\x01b" for i in range(number))
    return b"\x80\x02" + attributes + b"q\x01c__torch__.a\nB\n)\x81}(" + inner + b"ub."


@pytest.mark.parametrize("kind", ["tensors", "numbers", "a long name"])
def test_modules_that_share_many_attributes_are_refused(tmp_path: Path, kind: str) -> None:
    value = b"K\x01" if kind == "numbers" else tensor("0", (1,), (1,), numel=1)
    names = ["x" * 1_000_000] if kind == "a long name" else [str(i) for i in range(20_000)]
    items = b"".join(pickle_parts(name) + (value if i == 0 else b"h\x02") for i, name in enumerate(names))
    items = items.replace(value, value + b"q\x02", 1)
    content = modules_with_attributes(20_000, b"}(" + items + b"u")
    rewrite(CLIP, tmp_path / "clip.pt", lambda name, data: content if name.endswith("/data.pkl") else data)
    before = begin_peak()

    with pytest.raises(CheckpointError, match="modules without end"):
        read_tensor_file(tmp_path / "clip.pt", torchscript=True)

    assert peak() - before < 200e6


def test_modules_nested_without_end_are_refused(tmp_path: Path) -> None:
    module = b"c__torch__.a\nB\n)\x81"
    body = module
    for i in range(60):  # each module holds the previous one twice
        body = module + b"}(X\x01\0\0\0a" + body + b"q%cX\x01\0\0\0bh%cub" % (i, i)
    content = b"\x80\x02" + body + b"."
    rewrite(CLIP, tmp_path / "clip.pt", lambda name, data: content if name.endswith("/data.pkl") else data)
    with pytest.raises(CheckpointError, match="modules without end"):
        read_tensor_file(tmp_path / "clip.pt", torchscript=True)


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    rewrite(
        CLIP,
        tmp_path / "clip.pt",
        lambda name, data: bytes(50_000_000) if name.endswith("data.pkl") else data,
        method=zipfile.ZIP_DEFLATED,
    )
    before = begin_peak()
    with pytest.raises(CheckpointError, match="archive with compressed members"):
        read_tensor_file(tmp_path / "clip.pt", torchscript=True)
    assert peak() - before < 25e6


@pytest.mark.parametrize("value", [{"a": 1.5, "b": [None, True, (1, -2, 70_000, 1 << 40)]}, "text", 3, []])
def test_plain_values_are_read_as_pickle_reads_them(value: object) -> None:
    assert read_pickle(pickle.dumps(value, protocol=2)).value == pickle.load(io.BytesIO(pickle.dumps(value)))


def test_a_list_makes_one_dictionary_only_so_that_memory_stays_in_proportion() -> None:
    once = b"ccollections\nOrderedDict\nq\x00](K\x01N\x86e\x85q\x01"
    assert read_pickle(b"\x80\x02" + once + b"h\x00h\x01R" * 2 + b"\x86.").value == ({1: None}, {})


def test_names_of_tensors_are_shown_without_control_characters_and_cut(tmp_path: Path) -> None:
    torch.save({"\x1b[2J\u202e" + "x" * 1_000_000: "no tensor"}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError) as caught:
        read_tensor_file(tmp_path / "x.pt")
    assert "\\x1b[2J\\u202exxx" in caught.value.message
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.99])
@pytest.mark.parametrize("form", ["archive", "torch.save", "before torch 1.6", "safetensors"])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: float, form: str) -> None:
    tensors = {"a": torch.randn(100, 100)}
    path = tmp_path / ("x.safetensors" if form == "safetensors" else "x.pt")
    if form == "archive":
        shutil.copy(CLIP, path)
    elif form == "safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=form == "torch.save")
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])

    with pytest.raises(CheckpointError, match=r"is empty|cut short, damaged") as caught:
        read_tensor_file(path, torchscript=True)

    assert caught.value.__suppress_context__ or caught.value.__context__ is None


class RunsCode:
    """A pickle that would call `function` if it were loaded."""

    def __init__(self, function: Callable[[str], object]) -> None:
        self.function = function

    def __reduce__(self) -> tuple[Any, ...]:
        return (self.function, ("echo code from the file ran",))


@pytest.mark.parametrize(("function", "name"), [(print, "print"), (os.system, f"{os.name}.system")])
@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_is_not_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], function: Callable[[str], object], name: str, zipped: bool
) -> None:
    torch.save({"a": RunsCode(function)}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=rf"Python objects beside its tensors \(`[\w.]*{name}`\)"):
        read_tensor_file(tmp_path / "x.pt")
    assert "ran" not in capfd.readouterr().out


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_and_devices_are_refused_before_they_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.pt")
    for path in (tmp_path / "x.pt", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="is no regular file, where a file is wanted"):
            read_tensor_file(path)


def test_a_path_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    odd = Path(shutil.copy(CLIP, tmp_path / os.fsdecode(b"caf\xe9.pt")))
    with pytest.raises(CheckpointError, match=r"caf\\udce9\.pt' is not UTF-8"):
        read_tensor_file(odd, torchscript=True)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (Tensor.to_sparse, "sparse_tensor"),
        (lambda tensor: tensor.to("meta"), "meta_tensor_no_storage"),
        (lambda tensor: tensor.to(torch.complex64), "strided, complex64 on cpu"),
        (lambda tensor: tensor.long(), "strided, int64 on cpu"),
        (lambda tensor: tensor > 0, "strided, bool on cpu"),
        (lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8), "qtensor"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch warns about changes of its quantised and sparse tensors
def test_tensors_of_another_kind_are_refused(tmp_path: Path, change: Callable[[Tensor], Tensor], kind: str) -> None:
    torch.save({"a": change(torch.ones(3))}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=rf"`a` as a tensor of another kind \({kind}\)"):
        check_dense(read_tensor_file(tmp_path / "x.pt").tensors, what="it")


def test_a_block_number_beyond_all_keys_is_refused() -> None:
    assert count_blocks(["layers.3.a", "layers.12.b", "layersX", "layers.x.a"] * 3, "layers.", what="it") == 13
    with pytest.raises(CheckpointError, match="too few for so many blocks"):
        count_blocks(["layers.999999999999.a"], "layers.", what="it")


@pytest.mark.parametrize(
    ("name", "opener", "error"),
    [
        (
            "a.safetensors",
            "safetensors.safe_open",
            RuntimeError("unable to mmap 4 bytes from file <a>: Cannot allocate memory (12)"),
        ),
        ("a.pth", "llama_adapter.runtime.tensor_files.files.TorchFile", OSError(12, "Cannot allocate memory")),
    ],
)
def test_a_file_that_cannot_be_mapped_is_not_called_damaged(
    name: str, opener: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    save_file({"a": torch.zeros(1)}, tmp_path / name)
    monkeypatch.setattr(opener, fail)
    with pytest.raises(type(error)) as raised:
        read_tensor_file(tmp_path / name)

    assert describe(raised.value).sentence.startswith("The memory is not enough")
