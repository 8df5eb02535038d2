"""RobustBench's files: what must be refused and by which name, where to get them, how to save."""

import argparse
import json

import jax
import numpy as np
import pytest

from wdjax import models
from wdjax.files import persist, torch_file
from wdjax.models import convert, zoo


@pytest.fixture(scope="module")
def modas(shared):
    path = shared / "fixtures/zoo/modas/Modas2021PRIMEResNet18.pt"
    return torch_file.read(path)["state_dict"]


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


MUTATIONS = [
    (lambda s: without(s, "layer3.0.bn1.bias"), r"missing layer3\.0\.bn1\.bias"),
    (lambda s: without(s, "sigma"), "missing sigma"),
    (lambda s: {**s, "layer3.0.bn1.extra": s["bn1.bias"]}, r"unknown layer3\.0\.bn1\.extra"),
    (lambda s: {**s, "normalize.mean": s["mu"]}, r"unknown normalize\.mean"),
    (
        lambda s: {**s, "conv1.weight": s["conv1.weight"].transpose(1, 0, 2, 3)},
        r"conv1\.weight has shape \[3, 64, 3, 3\], expected \[64, 3, 3, 3\]",
    ),
    (lambda s: {**s, "linear.weight": s["linear.weight"].T}, r"linear\.weight has shape"),
    (lambda s: {**s, "bn1.weight": s["bn1.weight"].astype("f8")}, "bn1.weight has dtype float64"),
    (lambda s: {**s, "bn1.bias": s["bn1.bias"].astype("f2")}, "bn1.bias has dtype float16"),
    (lambda s: {**s, "linear.bias": s["linear.bias"] * np.nan}, "linear.bias holds NaN"),
    (lambda s: {**s, "mu": s["mu"] + np.inf}, "mu holds NaN or infinity"),
    (lambda s: {**s, "sigma": -s["sigma"]}, "sigma is not positive"),
    (lambda s: {**s, "module.mu": s["mu"]}, "names occur twice: mu"),
    (
        lambda s: {**s, "layer9.bn1.num_batches_tracked": np.array(3)},
        r"unknown layer9\.bn1\.num_batches_tracked",
    ),
    (lambda s: {**s, "model_preact_hl1.1.weight": s["conv1.weight"]}, "unknown model_preact_hl1"),
]


@pytest.mark.parametrize(("change", "message"), MUTATIONS)
def test_mutated_checkpoints_are_refused_by_name(modas, tmp_path, change, message):
    torch = pytest.importorskip("torch", reason="PyTorch writes the checkpoint")
    path = tmp_path / "mutated.pt"
    changed = change(modas)
    torch.save({k: torch.tensor(np.ascontiguousarray(v)) for k, v in changed.items()}, path)
    with pytest.raises(ValueError, match=message):
        convert.load_robustbench(
            "Modas2021PRIMEResNet18", "cifar10", "corruptions", path, any_size=True
        )


def test_a_buffer_that_contradicts_the_architecture(shared, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch writes the checkpoint")
    where = "Xu2024MIMIR_Swin-L", "imagenet", "Linf"
    state = torch_file.read(shared / f"fixtures/zoo/mimir_swinl/{where[0]}.pt")
    name = "layers.0.blocks.0.attn.relative_position_index"
    path = tmp_path / "transposed.pt"
    changed = {**state, name: np.ascontiguousarray(state[name].T)}
    torch.save({k: torch.tensor(v) for k, v in changed.items()}, path)
    with pytest.raises(
        ValueError, match=r"layers\.0\.blocks\.0\.attn\.relative_position_index diff"
    ):
        convert.load_robustbench(*where, path, any_size=True)


def test_a_missing_buffer(shared, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch writes the checkpoint")
    where = "Xu2024MIMIR_Swin-L", "imagenet", "Linf"
    state = torch_file.read(shared / f"fixtures/zoo/mimir_swinl/{where[0]}.pt")
    path = tmp_path / "unmasked.pt"
    changed = without(state, "layers.0.blocks.1.attn_mask")
    torch.save({k: torch.tensor(v) for k, v in changed.items()}, path)
    with pytest.raises(ValueError, match=r"missing layers\.0\.blocks\.1\.attn_mask"):
        convert.load_robustbench(*where, path, any_size=True)
    torch.save(
        {k: torch.tensor(v) for k, v in (state | {"normalize.mean": np.ones(3)}).items()}, path
    )
    with pytest.raises(
        ValueError, match=r"unknown normalize\.mean"
    ):  # Its input is not normalised.
        convert.load_robustbench(*where, path, any_size=True)


def test_mu_and_sigma_come_together(shared, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch writes the checkpoint")
    where = "Rice2020Overfitting", "cifar100", "Linf"
    state = torch_file.read(shared / f"fixtures/zoo/rice_c100/{where[0]}.pt")
    state = state.get("state_dict", state)
    path = tmp_path / "rice.pt"
    torch.save({k: torch.tensor(v) for k, v in without(state, "sigma").items()}, path)
    with pytest.raises(ValueError, match="missing sigma"):
        convert.load_robustbench(*where, path, any_size=True)
    both = without(without(state, "sigma"), "mu") | {"model_preact_hl1.1.weight": np.ones(3)}
    torch.save({k: torch.tensor(v) for k, v in both.items()}, path)
    _, report = convert.load_robustbench(*where, path, any_size=True)
    assert report.architecture["normalize"] == zoo.entry(*where).normalize
    assert "mu and sigma are not in the file" in str(report)


@pytest.mark.fast
def test_where_to_get_a_file(tmp_path):
    for name, threat, place in (
        ("Salman2020Do_R18", "Linf", "saves models/imagenet/Linf/Salman2020Do_R18.pt"),
        ("Tian2022Deeper_DeiT-S", "corruptions", "torch/hub/checkpoints"),
        ("Standard_R50", "Linf", "torch/hub/checkpoints"),
    ):
        with pytest.raises(FileNotFoundError, match=place):
            convert.load_robustbench(name, "imagenet", threat, tmp_path)


@pytest.mark.fast
def test_wrong_names_and_places(tmp_path):
    with pytest.raises(ValueError, match="no model 'Carmon2020'"):
        convert.load_robustbench("Carmon2020", "cifar10", "Linf", tmp_path)
    with pytest.raises(ValueError, match="no models for 'mnist'"):
        convert.load_robustbench("Standard", "mnist", "Linf", tmp_path)
    with pytest.raises(FileNotFoundError, match="nothing is downloaded"):
        convert.load_robustbench("Carmon2019Unlabeled", "cifar10", "Linf", tmp_path)


@pytest.mark.parametrize("out", ["model.safetensors", "model"])
def test_the_command_saves_what_restore_reads(shared, tmp_path, capsys, out):
    weights = shared / "fixtures/zoo/hendrycks/Hendrycks2019Using.pt"
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    place = str(tmp_path / out)
    args = [str(weights), "--name", "Hendrycks2019Using", "--any-size", "--out", place]
    assert convert.main(parser.parse_args(args)) == 0
    assert "1,467,610 parameters" in capsys.readouterr().out
    model, _ = convert.load_robustbench(
        "Hendrycks2019Using", "cifar10", "Linf", weights, any_size=True
    )
    restored = persist.load_model(place)
    assert restored.func == model.func
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.fast
def test_affine_parameters_come_apart_and_together(shared):
    weights = shared / "fixtures/zoo/hendrycks/Hendrycks2019Using.pt"
    model, _ = convert.load_robustbench(
        "Hendrycks2019Using", "cifar10", "Linf", weights, any_size=True
    )
    affine, rest = models.split_affine(model.args[0])
    assert len(affine) == 25
    assert jax.tree.structure(models.join_affine(affine, rest)) == jax.tree.structure(model.args[0])


@pytest.mark.fast
@pytest.mark.parametrize("name", ["hendrycks", "liu_convnextb", "mimir_swinl", "rice_c100"])
def test_any_tensor_that_is_missing_or_odd_is_named(shared, monkeypatch, name):
    facts = json.loads((shared / "fixtures/zoo/manifest.json").read_text())[name]
    where = facts["name"], facts["dataset"], facts["threat"]
    path = shared / "fixtures/zoo" / facts["files"][0]
    content = torch_file.read(path)
    content = content.get("state_dict", content)
    tensors = [n for n in content if "num_batches" not in n and "normalize." not in n]
    for picked in np.random.default_rng(0).choice(tensors, 6):
        tensor = content[picked]
        for changed in (
            without(content, picked),
            {**content, picked: tensor.astype("i1")},
            {**content, picked: tensor[..., None]},
            {**content, picked + "_": tensor},
        ):
            monkeypatch.setattr(torch_file, "read", lambda _, changed=changed: changed)
            with pytest.raises(ValueError, match=picked.removeprefix("module.").partition(".")[2]):
                convert.load_robustbench(*where, path, any_size=True)
