"""The shipped tables: whole, consistent with each other, each number with its source."""

import csv
import json
import re

import pytest

from uma import catalog
from uma.catalog import DATA, Chip, Gpu, Mac, Model, Repository, UnifiedMachine, observed
from uma.catalog.observed import BandwidthFigure, KnownBad, WorkingSet

TABLES = {
    "chips.csv": (Chip, catalog.chips, ("chip", "bin")),
    "macs.csv": (Mac, catalog.macs, ("model", "chip", "cpu_cores", "memory_gib", "price_usd")),
    "gpus.csv": (Gpu, catalog.gpus, ("name",)),
    "unified.csv": (UnifiedMachine, catalog.unified_machines, ("name",)),
    "working_set.csv": (WorkingSet, observed.working_sets, ()),
    "models.csv": (Model, catalog.models, ("hf_id",)),
    "repositories.csv": (Repository, catalog.repositories, ("repo",)),
    "bandwidth.csv": (BandwidthFigure, observed.bandwidth_figures, ()),
    "known_bad.csv": (KnownBad, observed.known_bad, ("package", "effect")),
}
CONFIGS = sorted(path.stem for path in (DATA / "models").glob("*.json"))


def rows(name):
    with open(DATA / name, encoding="utf-8", newline="") as file:
        assert re.fullmatch(rf"# {re.escape(name)} - \d+ - \d{{4}}-\d\d-\d\d\n", next(file))
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", TABLES)
def test_the_columns_of_a_table_are_the_fields_of_its_rows(name):
    row, read, _ = TABLES[name]
    lines = rows(name)
    assert list(lines[0]) == list(row._fields)
    assert len(read()) == len(lines)
    assert all(None not in line.values() and None not in line for line in lines)


@pytest.mark.parametrize("name", TABLES)
def test_every_row_has_a_source(name):
    assert [line for line in rows(name) if not line["source"].strip()] == []


@pytest.mark.parametrize("name", [name for name, (_, _, key) in TABLES.items() if key])
def test_no_row_is_there_twice(name):
    _, read, key = TABLES[name]
    seen = [tuple(getattr(row, part) for part in key) for row in read()]
    assert [one for one in set(seen) if seen.count(one) > 1] == []


@pytest.mark.parametrize("path", sorted(DATA.rglob("*")), ids=lambda path: path.name)
def test_no_file_names_a_place_of_the_machine_it_was_made_on(path):
    if path.is_file():
        text = path.read_text("utf-8")
        assert not re.search(r"(?<![\w.:/])/(work|tmp|home|root|Users|opt)/|find_string", text)
        assert "\r" not in text


def test_the_readme_counts_the_rows_as_they_are():
    told = dict(re.findall(r"^\| `([\w/*.]+)` \| (\d+) \|", (DATA / "README.md").read_text(), re.M))
    assert int(told.pop("models/*.json")) == len(CONFIGS)
    assert {name: int(count) for name, count in told.items()} == {
        path.name: len(rows(path.name)) for path in DATA.glob("*.csv")
    }


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.glob("*.csv")))
def test_every_row_is_one_line(name):
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(rows(name)) + 2  # a comment, the columns


def test_a_row_that_is_read_alone_is_the_row_of_the_table():
    for model in catalog.models():
        assert catalog.find_model(model.hf_id.upper()) == model
    for repository in catalog.repositories():
        assert catalog.find_repository(repository.repo.upper()) == repository
    for hf_id in {repository.hf_id for repository in catalog.repositories()}:
        alike = tuple(row for row in catalog.repositories() if row.hf_id == hf_id)
        assert catalog.repositories_of(hf_id) == alike


def test_every_model_has_a_config_and_every_config_a_model():
    assert {model.config for model in catalog.models()} == set(CONFIGS)


def test_config_names_differ_in_more_than_case():
    assert len({name.lower() for name in CONFIGS}) == len(CONFIGS)


def test_a_config_names_its_source_and_keeps_its_own_keys():
    for model in catalog.models():
        config = catalog.model_config(model)
        assert config.source
        assert not {"_source", "_note"} & set(config.values)
        if config.basis == "exact" and model.config == model.hf_id.replace("/", "__"):
            assert config.values["model_type"] == model.model_type, model.hf_id


def test_own_keys_replace_those_of_a_sibling_s_config():
    """Qwen3-Coder-30B is described by the config of Qwen3-30B-A3B, made for 40,960 tokens."""
    coder, base = (
        catalog.find_model(f"Qwen/Qwen3-{name}") for name in ("Coder-30B-A3B-Instruct", "30B-A3B")
    )
    assert coder.config == base.config
    lengths = [catalog.model_config(m).values["max_position_embeddings"] for m in (coder, base)]
    assert lengths == [262144, 40960]


def test_own_keys_are_said_by_name_and_number():
    pairs = [pair for model in catalog.models() for pair in model.own_keys.split()]
    assert pairs
    assert [pair for pair in pairs if not re.fullmatch(r"[a-z_]+=[1-9]\d*", pair)] == []


def test_a_basis_is_one_of_three():
    assert {m.config_basis for m in catalog.models()} == {"exact", "transcribed", "derived"}


def test_a_derived_config_says_so_itself():
    for model in catalog.models():
        note = json.loads((DATA / "models" / f"{model.config}.json").read_text()).get("_note", "")
        assert (model.config_basis == "derived") == note.startswith("synthesised"), model.hf_id


def test_the_parameters_from_shapes_are_those_the_hub_states_for_plain_decoders():
    """The two columns have different origins; these families have nothing that only one counts."""
    plain = ("Llama-3.1-8B", "Meta-Llama-3-70B", "Qwen2.5-7B", "Mistral-7B-Instruct-v0.3", "phi-4")
    chosen = [m for m in catalog.models() if any(name in m.hf_id for name in plain)]
    assert len(chosen) >= 5
    for model in chosen:
        assert model.parameters == pytest.approx(model.parameters_hf, rel=1e-5), model.hf_id


def test_a_repositorys_model_is_in_the_catalog():
    ids = {model.hf_id for model in catalog.models()}
    assert {r.hf_id for r in catalog.repositories() if r.hf_id} <= ids


def test_a_repositorys_bits_are_those_in_its_name():
    for repository in catalog.repositories():
        named = re.search(r"(\d)-?bits?\b", repository.repo, re.IGNORECASE)
        if named and repository.mode in ("affine", "mxfp8"):
            assert repository.bits == int(named[1])


def test_a_published_size_is_that_of_its_bits():
    """A scale and a bias of 16 bits per 64 weights add half a bit; embeddings and a vision tower
    kept at 16 bits add to that, much in small models, which are left out."""
    models = {model.hf_id: model for model in catalog.models()}
    for repository in catalog.repositories():
        model = models.get(repository.hf_id)
        large = model and (model.parameters or 0) > 5e9
        if large and repository.size_bytes and repository.mode == "affine":
            bits = repository.size_bytes * 8 / model.parameters
            assert repository.bits + 0.4 < bits < repository.bits + 1.4, (repository.repo, bits)


def test_the_published_4_bit_size_of_a_70b_llama():
    sizes = {r.repo: r.size_bytes for r in catalog.repositories()}
    assert sizes["mlx-community/Llama-3.1-Nemotron-70B-Instruct-HF-4bit"] == 39_688_355_840


def test_an_alias_means_a_model_of_the_catalog():
    ids = {model.hf_id for model in catalog.models()}
    assert {line["hf_id"] for line in rows("aliases.csv")} <= ids


def test_a_macs_chip_was_made_with_its_cores_and_memory():
    for mac in catalog.macs():
        bins = [chip for chip in catalog.chips() if chip.chip == mac.chip]
        assert bins, mac.chip
        for cores in mac.gpu_cores:
            assert any(chip.gpu_cores == cores for chip in bins), (mac.model, cores)
        memory = {gib for chip in bins for gib in chip.memory_gib}
        assert mac.memory_gib in memory, (mac.model, mac.chip, mac.memory_gib)


@pytest.mark.parametrize(
    ("chip", "gpu_cores", "gb_per_s"),
    [("M1", 8, 68.25), ("M3 Pro", 18, 150), ("M3 Max", 30, 300), ("M3 Max", 40, 400),
     ("M4", 10, 120), ("M4 Pro", 20, 273), ("M4 Max", 32, 410), ("M4 Max", 40, 546),
     ("M3 Ultra", 80, 819), ("M5 Max", 40, 614)],
)  # fmt: skip
def test_bandwidths_are_those_that_apple_prints(chip, gpu_cores, gb_per_s):
    (found,) = catalog.find_chips(chip, gpu_cores)
    assert found.bandwidth_gb_per_s == gb_per_s


def test_a_driver_reports_no_more_memory_than_was_sold():
    for gpu in catalog.gpus():
        if gpu.memory_mib is not None:
            assert 0.85 * gpu.memory_gb * 1024 < gpu.memory_mib <= gpu.memory_gb * 1024, gpu.name


def test_a_working_set_is_a_part_of_the_memory():
    for row in observed.working_sets():
        assert row.macos in ("15", "26", "any", "") or not row.default
        assert 0.6 < row.working_set_bytes / (row.memory_gib << 30) < 0.93


@pytest.mark.parametrize("name", [name for name in TABLES if name != "models.csv"])
def test_a_table_is_small(name):
    assert (DATA / name).stat().st_size < 60_000


def test_the_folder_is_small_without_the_measured_rows_that_no_wheel_holds():
    files = [path for path in DATA.rglob("*") if path.is_file() and path.parent.name != "truth"]
    assert sum(path.stat().st_size for path in files) < 1_000_000
