"""Store features of a pretrained speech model for every utterance of a corpus, as Kaldi-style directories.

    python -m attnlab.data.speech.extract --root AMI --output WAVLM_FEATURES --layer all
    python -m attnlab experiment=mtla/table3 attention=mtla stride=2 data_root=WAVLM_FEATURES

Needs the extra `hf` and the weights of the model (by default microsoft/wavlm-large).  The files text, feats.scp and
feats/<id>.npy (float16) are written to <output>/<split>/; features that exist are not computed again, so that an
interrupted command continues.  <output>/extraction.json names their model and layer; others are refused.

A file has (frames, width) of one layer or of the mean of all, and with --layer all (frames, layers, width), which
task.data.features.layers reads and task.model.encoder.mix_layers mixes with learned weights.  The 25 layers of WavLM
Large take 2.56 MB for a second of speech (50 frames of 25 x 1024 float16): 2.8 TB for AMI at its three speeds.
"""

import argparse
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import cast

import attnlab.torchvision_schemas  # noqa: F401  (before transformers)

import numpy as np
import soxr
import torch

import attnlab.data as readers
from attnlab.data.corpus import Reader, Segment, at_speed, read_json
from attnlab.data.report import FILES, Report
from attnlab.data.speech.features import Array, change_speed, read_waveform
from attnlab.errors import AttnlabError, DataError
from attnlab.pretrained.weights import first_line
from attnlab.run.console import StderrHandler, each
from attnlab.run.files import write_bytes, write_text

log = logging.getLogger(__name__)
MASKED = "masked_spec_embed"  # takes the place of masked frames in training alone, and some models come without it
RATE = 16000  # what the pretrained models were trained on
Model = Callable[[Array], Array]  # (samples,) at RATE -> (frames, width)


def extract(
    reader: Reader, root: Path, output: Path, model: Model, speeds: Sequence[float], about: Mapping[str, str]
) -> None:
    """Store the features of all splits.

    Args:
        speeds: the training split is stored once at each of these speeds.
        about: what the features are of, such as `model` and `layer`; those in `output` must be of the same.

    Raises:
        DataError: the corpus cannot be read, an id cannot be the name of a file, `output` is the corpus itself or holds
            features of another model or layer, or values are beyond float16.
    """
    report = Report()
    with report.of(FILES):
        reader.check(root, reader.splits, "audio")
    if root.resolve() == output.resolve():
        raise DataError(f"--output={output}: the corpus itself, whose text files would be replaced; use another one")
    mark = output / "extraction.json"
    if mark.is_file() and (stored := read_json(mark)) != about:
        raise DataError(f"{mark}: the features here are of {stored}, not of {about}; use another --output")
    paths: dict[Path, Segment] = {}
    for split in reader.splits:
        with report.of(split) as size:
            segments = cast(list[Segment], list(reader.read(root, split, "audio", False)))
            size.used, size.unit = len(segments), reader.unit
        if split == reader.splits[0]:
            segments = [at_speed(x, speed) for speed in speeds for x in segments]
        if odd := [x.id for x in segments if Path(x.id).name != x.id or " " in x.id]:
            raise DataError(f"{root}: {odd[0]!r} of {split} cannot be the name of a file")
        write_text(output / split / "text", "".join(f"{x.id} {x.target}\n" for x in segments))
        write_text(output / split / "feats.scp", "".join(f"{x.id} {split}/feats/{x.id}.npy\n" for x in segments))
        paths |= {output / split / "feats" / f"{x.id}.npy": x for x in segments}
    report.show()
    write_text(mark, json.dumps(about, indent=1))
    for path, x in each("computing features", [(path, x) for path, x in paths.items() if not path.is_file()]):
        write_bytes(path, _features(x, model))


def _features(x: Segment, model: Model) -> bytes:
    """The bytes of a .npy file, float16."""
    samples = change_speed(read_waveform(x.audio, x.start, x.num_samples), x.rate, x.speed)
    with np.errstate(over="ignore"):
        features = model(soxr.resample(samples, x.rate, RATE)).astype(np.float16)
    if not np.isfinite(features).all():
        raise DataError(f"{x.audio}: {x.id} has features that are NaN or beyond float16 (65504); take another --layer")
    stream = BytesIO()
    np.save(stream, features, allow_pickle=False)
    return stream.getvalue()


def pretrained(name: str, layer: str, device: str) -> Model:
    """The hidden states of a Hugging Face model.

    Args:
        name: of the model, or its directory.
        layer: the number of a layer (0: the input of the first one), "mean" of all layers, or "all": (frames, layers,
            width).

    Raises:
        DataError: transformers is not installed, the model cannot be read, its weights are of another architecture, or
            it has no such layer.
    """
    try:
        from transformers import AutoModel

        # neither a .bin file nor the folder runs code
        network, keys = AutoModel.from_pretrained(
            name, weights_only=True, trust_remote_code=False, output_loading_info=True
        )
        network = network.eval().to(device)
    except Exception as error:  # safetensors, torch, the hub and transformers each have other classes
        expected = "a folder with config.json and model.safetensors (or pytorch_model.bin, tensors alone), or a name"
        why = f"{first_line(error)}; it needs pip install 'attnlab[hf]'"
        raise DataError(f"--model={name} --device={device}: cannot be read ({why}); expected {expected}") from error
    if missing := sorted({*keys["missing_keys"]} - {MASKED}):
        raise DataError(f"--model={name}: its weights lack {missing[0]}; they are of another architecture")
    if unused := sorted(keys["unexpected_keys"]):
        log.info("--model=%s: %d tensors are not used, such as %s", name, len(unused), unused[0])
    layers = int(network.config.num_hidden_layers) + 1
    if layer.isdecimal() and int(layer) >= layers:
        raise DataError(f"--layer={layer}: {name} has the layers 0 to {layers - 1}")

    @torch.inference_mode()
    def run(samples: Array) -> Array:
        x = torch.from_numpy(samples).to(device)[None]
        x = torch.nn.functional.layer_norm(x, x.shape[-1:])  # as the large models were trained
        states = network(x, output_hidden_states=True).hidden_states
        match layer:
            case "all":
                chosen = torch.stack(states, 2)
            case "mean":
                chosen = torch.stack(states).mean(0)
            case _:
                chosen = states[int(layer)]
        return chosen[0].float().cpu().numpy()

    return run


def main() -> None:
    """Extract features of a pretrained speech model for every utterance of a corpus, as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m attnlab.data.speech.extract", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--root", type=Path, required=True, help="the directory of the corpus")
    parser.add_argument("--output", type=Path, required=True, help="the directory for the features")
    parser.add_argument("--reader", default="AMI", choices=("AMI", "Kaldi", "AN4"))
    parser.add_argument("--model", default="microsoft/wavlm-large", help="a name or a directory")
    parser.add_argument("--layer", default="mean", help="the number of a layer, mean, or all")
    parser.add_argument("--speeds", type=float, nargs="+", default=[0.9, 1.0, 1.1], help="speeds of the training split")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.layer not in ("mean", "all") and not options.layer.isdecimal():
        parser.error(f"--layer={options.layer}: expected mean, all or an int")
    if not all(0 < speed < math.inf for speed in options.speeds):
        parser.error(f"--speeds={' '.join(map(str, options.speeds))}: expected numbers above 0")
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[StderrHandler()])
    try:
        reader: Reader = getattr(readers, options.reader)()
        reader.check(options.root, reader.splits, "audio")  # before the model, which may be downloaded
        model = pretrained(options.model, options.layer, options.device)
        about = {"model": options.model, "layer": options.layer}
        extract(reader, options.root, options.output, model, sorted(set(options.speeds)), about)
    except AttnlabError as error:
        parser.exit(error.exit_code, f"error: {error}\n")


if __name__ == "__main__":
    main()
