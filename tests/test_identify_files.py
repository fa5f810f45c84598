"""identify on the command line: what files may hold, and what they may not."""

import io
import json
import os
import pickle
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest
import torch

from axisnorm import Scheme, identify, reference
from axisnorm.__main__ import main
from axisnorm.lens.files import arrays_of, read
from axisnorm.scheme import ArgumentError, DtypeError


class Marked:
    """Unpickling it leaves a trace."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def arrays():
    random = np.random.default_rng(0)
    x = random.normal(size=(6, 5, 8)).astype(np.float32)
    weight = random.uniform(0.5, 1.5, 8).astype(np.float32)
    bias = random.normal(size=8).astype(np.float32)
    y, _ = reference.forward(x, Scheme.layer_norm(), weight, bias)
    return {"x": x, "y": y, "weight": weight, "bias": bias}


@pytest.fixture
def folder(tmp_path, monkeypatch, arrays):
    monkeypatch.chdir(tmp_path)
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
    np.savez("all.npz", **arrays)
    np.savez("others.npz", a=arrays["x"], b=arrays["y"])
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    torch.save(tensors, "all.pt")
    torch.save({"inside": [tensors["x"], {"y": tensors["y"]}]}, "nested.pt")
    torch.save(tensors["y"], "y.pth")
    save_safetensors("all.safetensors", {k: ("F32", v) for k, v in arrays.items()})
    return tmp_path


def save_safetensors(path, arrays):
    header, data = {}, b""
    for name, (kind, array) in arrays.items():
        raw = array.tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}  # fmt: skip
        data += raw
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def run(capsys, *arguments):
    try:
        status = main(["identify", *arguments])
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (("x.npy", "y.npy"), False),
        (("x.npy", "y.npy", "--weight", "weight.npy", "--bias", "bias.npy"), True),
        (("all.npz",), True),
        (("all.npz:x", "all.npz:y"), False),
        (("others.npz:a", "others.npz:b", "--weight", "all.npz:weight", "--bias=bias.npy"), True),
        (("all.pt",), True),
        (("nested.pt:inside.0", "nested.pt:inside.1.y"), False),
        (("x.npy", "y.pth"), False),
        (("all.safetensors",), True),
        (("all.safetensors:x", "all.pt:y"), False),
    ],
)
def test_files(capsys, folder, arguments, given):
    status, out, err = run(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    best = json.loads(out)["best"]
    assert best["scheme"] == "... [d]; affine=d"
    assert best["weight"]["from"] == best["bias"]["from"] == ("given" if given else "fitted")
    status, out, err = run(capsys, *arguments)
    assert (status, err) == (0, "") and "one mean a token" in out and "\x1b" not in out


def test_running_statistics_from_files(capsys, folder):
    random = np.random.default_rng(1)
    x, mean, var = random.normal(size=(6, 5)), random.normal(size=5), random.uniform(1, 2, 5)
    scheme = Scheme.batch_norm(affine="", statistics="running")
    y, _ = reference.forward(x, scheme, running_mean=mean, running_var=var)
    for name, array in (("x", x), ("y", y), ("m", mean), ("v", var)):
        np.save(f"r{name}.npy", array)
    np.savez("r.npz", x=x, y=y, running_mean=mean, running_var=var)
    for arguments in (
        ("rx.npy", "ry.npy", "--running-mean", "rm.npy", "--running-var", "rv.npy"),
        ("r.npz",),
    ):
        status, out, _ = run(capsys, *arguments, "--json")
        assert status == 0
        assert json.loads(out)["best"]["scheme"] == "[n] d; statistics=running"


def test_bfloat16_in_files(folder, arrays):
    narrow = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
    np.save("narrow.npy", narrow["x"])
    save_safetensors("narrow.safetensors", {k: ("BF16", v) for k, v in narrow.items()})
    torch.save(torch.from_numpy(arrays["x"]).bfloat16(), "narrow.pt")
    for found in (read("narrow.npy"), read("narrow.safetensors:x")):
        assert found.dtype == ml_dtypes.bfloat16 and found.shape == (6, 5, 8)
        np.testing.assert_array_equal(found, narrow["x"])
    assert read("narrow.pt").dtype == torch.bfloat16


def test_other_types_in_safetensors(folder):
    values = np.arange(6).reshape(2, 3)
    save_safetensors("types.safetensors", {
        "d": ("F64", values.astype("<f8")), "h": ("F16", values.astype("<f2")),
        "i": ("I64", values.astype("<i8")), "b": ("U8", values.astype("u1")),
    })  # fmt: skip
    found = arrays_of("types.safetensors")
    for name, dtype in (("d", "float64"), ("h", "float16"), ("i", "int64"), ("b", "uint8")):
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], values)


def test_pickles_are_not_loaded(capsys, folder):
    trace = folder / "trace"
    torch.save({"x": Marked(trace)}, "evil.pt")
    with open("evil.npy", "wb") as file:
        pickle.dump(Marked(trace), file)
    with open("raw.pt", "wb") as file:
        pickle.dump(Marked(trace), file)
    array = np.empty(1, dtype=object)
    array[0] = Marked(trace)
    np.save("objects.npy", array, allow_pickle=True)
    np.savez("objects.npz", x=array, y=array)
    for name in ("evil.pt", "evil.npy", "raw.pt", "objects.npy", "objects.npz"):
        status, out, err = run(capsys, "x.npy", f"{name}:x" if name.endswith("npz") else name)
        assert (status, out) == (2, "") and err.count("\n") == 1, name
        assert not trace.exists(), name
    status, _, err = run(capsys, "x.npy", "objects.npy")
    assert "--allow-pickle" in err
    # Only when asked to.
    status, _, err = run(capsys, "x.npy", "evil.pt", "--allow-pickle")
    assert status == 2 and trace.exists()


def npy_header(shape):
    """A file of NumPy that ends after its header."""
    said = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(said)) + said.encode()


def zipped(name=None, content=b""):
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as archive:
            if name is not None:
                archive.writestr(name, content)
        return file.getvalue()


def safetensors(header, data=b""):
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bad.npy", b"hello", "A .npy file holds one array of NumPy."),
        ("bad.npy", b"other", "its first bytes are others"),
        ("bad.npy", b"", "it is empty"),
        ("bad.npy", npy_header("(10000000000000,)"), "its shape is too large"),
        ("bad.npy", npy_header(f"({10**23},)"), "its shape is too large"),
        ("bad.npy", npy_header("(3,)"), "Failed to read all data for array). Save"),
        ("bad.npy", b"\x93NUMPY\x01\x00", "does not"),
        ("bad.npz", b"PK nonsense", "it is no archive"),
        ("bad.npz", b"", "it is empty"),
        ("bad.npz", zipped("x.npy", npy_header("(10000000000000,)")), "its shape is too large"),
        ("bad.npz", zipped("x", b"hello"), "a file in it is no array"),
        ("bad.npz", zipped(), "has none"),
        ("bad.safetensors", b"", "it is empty"),
        ("bad.safetensors", safetensors(b'{"a":' * 100_000), "its header is no JSON"),
        ("bad.safetensors", safetensors(b"[1]"), "its header is no table of tensors"),
        ("bad.safetensors", safetensors(b'{"x": 3}'), "its header is no table of tensors"),
        ("bad.safetensors", safetensors(b"{}"), "has none"),
        *(
            ("bad.safetensors", safetensors(json.dumps({"x": entry}).encode(), b"1234"), said)
            for entry, said in (
                ({"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}, "no whole numbers"),
                ({"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}, "no whole numbers"),
                ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "no whole numbers"),
                ({"dtype": "F32", "shape": [1]}, "the data_offsets of a tensor"),
                ({"dtype": "F32", "shape": [1], "data_offsets": [0]}, "no beginning and end"),
                ({"shape": [1], "data_offsets": [0, 4]}, "the type None has no array"),
            )
        ),
        ("bad.safetensors", b"\xff" * 40, "its header has no length"),
        ("bad.safetensors", struct.pack("<Q", 4) + b"nope", "A .safetensors file"),
        ("bad.safetensors", struct.pack("<Q", 2) + b"[]", "A .safetensors file"),
        (
            "bad.safetensors",
            struct.pack("<Q", 62)
            + b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4000000000]}}'[:62],
            "A .safetensors file",
        ),
        ("bad.pt", b"garbage", "A .pt file holds tensors of torch."),
        ("bad.pt", b"", "it is empty"),
        ("bad.txt", b"1 2 3", "is none by its name"),
    ],
)
def test_files_that_are_not_what_they_say(capsys, folder, name, content, said):
    (folder / name).write_bytes(content)
    before = sorted(folder.iterdir())
    status, out, err = run(
        capsys, "x.npy", f"{name}:x" if name.endswith(("z", "s")) and content else name,
        "--html", "page.html", "--figure", "figure.png",
    )  # fmt: skip
    assert (status, out) == (2, "") and said in err
    assert err.startswith("axisnorm identify: ") and err.count("\n") == 1
    assert sorted(folder.iterdir()) == before


def test_a_tensor_outside_of_its_file(folder):
    header = b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 80]}}'
    (folder / "bad.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    with pytest.raises(ArgumentError, match="a tensor lies outside of the file"):
        read("bad.safetensors:x")
    header = b'{"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}'
    (folder / "bad.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    with pytest.raises(ArgumentError, match="size is not that of its shape"):
        read("bad.safetensors")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("x.npy",), "'x.npy' has one array without a key"),
        (("x.npy", "y.npy:y"), "which has one array without a key. Leave the key out."),
        (("empty.npz",), "'empty.npz' has no array"),
        (("others.npz",), "'others.npz' has 'a', 'b'"),
        (("x.npy", "all.npz"), "needs a key"),
        (("x.npy", "all.npz:z"), "'z' is none of 'all.npz'"),
        (("x.npy", "missing.npy"), "'missing.npy' does not exist"),
        (("x.npy", "missing.npz:y"), "'missing.npz' does not exist"),
        (("x.npy", "long" * 100 + ".npy"), "does not exist"),
        (("x.npy", "nul\0.npy"), "does not exist"),
        (("x.npy", "y.npy", "bias.npy"), "3 files came"),
        (("x.npy", "weight.npy"), "They have (6, 5, 8) and (8,)"),
        (("x.npy", "y.npy", "--weight", "x.npy:k"), "'k' is none"),
        (("x.npy", "y.npy", "--running-mean", "bias.npy"), "come together"),
        ((), "required: FILE"),
    ],
)
def test_wrong_use(capsys, folder, arguments, said):
    np.savez("empty.npz")
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1


def test_bad_values_in_files(capsys, folder, arrays):
    broken = arrays["y"].copy()
    broken[1, 2, 3] = np.nan
    np.save("nan.npy", broken)
    np.save("integers.npy", np.arange(240).reshape(6, 5, 8))
    np.save("constant.npy", np.full((6, 5, 8), 2.5))
    np.save("one.npy", np.ones(1))
    for other, said in (
        ("nan.npy", "y[1, 2, 3] is nan"),
        ("integers.npy", "y is int64"),
        ("constant.npy", "y is 2.5 throughout"),
    ):
        status, out, err = run(capsys, "x.npy", other)
        assert (status, out) == (2, "") and said in err and err.count("\n") == 1
    status, _, err = run(capsys, "one.npy", "one.npy")
    assert status == 2 and "at least two" in err


def test_the_order_of_bytes_and_of_axes_does_not_matter(folder, arrays):
    """Arrays of the other byte order were refused as '>f4'."""
    plain = identify(**arrays).to_dict()
    for change in (
        lambda a: a.astype(a.dtype.newbyteorder()),
        lambda a: np.asfortranarray(a),
        lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    ):
        for name, array in arrays.items():
            np.save(f"other_{name}.npy", change(array))
        changed = {name: read(f"other_{name}.npy") for name in arrays}
        assert identify(**changed).to_dict() == plain


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (np.zeros(3, [("a", "f4"), ("b", "f4")]), "Give one of its fields, as in x['a']."),
        (np.zeros(3, complex), "x is complex128. Give its real part, x.real."),
        (np.array(["a", "b"]), "x is <U1. Give numbers."),
        (np.array(["2020-01-01"], "M8[D]"), "Give numbers."),
        (np.array([None, 1]), "x is object. Give numbers."),
        (np.arange(3), "x is int64. Convert it, as in x.astype('float64')."),
        (np.zeros(3, bool), "Convert it, as in x.astype('float64')."),
        (np.zeros(3, np.longdouble), "Convert it, as in x.astype('float64')."),
        (torch.arange(3), "x is int64. Convert it, as in x.double()."),
        ([1.0, 2.0], "x is a list."),
        (3, "x is an int."),
    ],
    ids=str,
)
def test_what_is_no_array_of_floating_numbers(made, said):
    with pytest.raises((ArgumentError, DtypeError)) as caught:
        identify(made, np.zeros(3))
    assert said in str(caught.value)


def test_files_of_numpy_do_without_torch(folder):
    import subprocess
    import sys

    code = (
        "import sys; from axisnorm.__main__ import main; status = main(['identify', 'all.npz']); "
        "assert not {'torch', 'matplotlib'} & set(sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "one mean a token" in done.stdout, done.stderr


def test_a_colon_in_a_name(capsys, folder, arrays):
    np.save("a:b.npy", arrays["x"])
    status, _, err = run(capsys, "a:b.npy", "y.npy")
    assert (status, err) == (0, "")


def test_what_torch_finds_odd_about_a_file_is_not_printed(capfd, folder, recwarn):
    with open("protocol.pt", "wb") as file:
        pickle.dump({"x": np.zeros(3)}, file, protocol=4)
    with pytest.raises(ArgumentError, match="Pickled objects can run any code"):
        read("protocol.pt")
    assert not recwarn and capfd.readouterr().err == ""


def test_a_text_that_is_called_a_file_of_torch(folder):
    with open("text.pt", "w") as file:
        file.write("hello")
    with pytest.raises(ArgumentError, match=r"'text.pt' does not \(it cannot be unpacked\)"):
        read("text.pt")


def test_candidates_are_readable_on_narrow_terminals(capsys, folder, monkeypatch):
    """Names and schemes had twelve columns and took five lines each."""
    for width in (40, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        status, out, _ = run(capsys, "x.npy", "y.npy")
        part = out.split("Candidates")[1].split("\n\n")[0]
        lines = part.strip("\n").splitlines()
        count = sum(line.startswith(("  BEST", "  no", "  fits")) for line in lines)
        assert status == 0 and max(map(len, lines)) <= width
        assert count == part.count("off by") > 3 and len(lines) <= (4 if width == 40 else 2) * count
