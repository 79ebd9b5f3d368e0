"""Store features of a pretrained speech model for every utterance of a corpus, as Kaldi-style directories.

    python -m attnlab.data.speech.extract --root AMI --output WAVLM_FEATURES
    python -m attnlab experiment=mtla/table3 attention=mtla stride=2 data_root=WAVLM_FEATURES

Needs the extra `hf` and the weights of the model (by default microsoft/wavlm-large).  The files text, feats.scp and
feats/<id>.npy (float16) are written to <output>/<split>/; features that exist are not computed again.
"""

import argparse
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import cast

import numpy as np
import soxr
import torch

import attnlab.data as readers
from attnlab.data.corpus import Reader, Segment
from attnlab.data.speech.features import Array, change_speed, read_waveform
from attnlab.errors import AttnlabError, DataError
from attnlab.runs.console import StderrHandler
from attnlab.runs.files import write_bytes
from attnlab.runs.progress import each

RATE = 16000  # what the pretrained models were trained on
Model = Callable[[Array], Array]  # (samples,) at RATE -> (frames, width)


def extract(reader: Reader, root: Path, output: Path, model: Model, speeds: Sequence[float] = (1.0,)) -> None:
    """Store the features of all splits.

    Args:
        reader: of the corpus.
        root: the directory of the corpus.
        output: the directory for the features.
        model: waveform to features.
        speeds: the training split is stored once at each of these speeds.

    Raises:
        DataError: the corpus cannot be read, or an id cannot be the name of a file.
    """
    reader.check(root, reader.splits, "audio")
    for split in reader.splits:
        found = cast(list[Segment], list(reader.read(root, split, "audio", False)))
        if split == reader.splits[0]:
            found = [replace(x, speed=s, id=x.id if s == 1.0 else f"sp{s:g}-{x.id}") for s in speeds for x in found]
        for x in each(f"computing features of {split}", found):
            path = output / split / "feats" / f"{x.id}.npy"
            if path.parent != output / split / "feats" or " " in x.id:
                raise DataError(f"{root}: {x.id!r} of {split} cannot be the name of a file")
            if not path.is_file():
                samples = change_speed(read_waveform(x.audio, x.start, x.num_samples), x.rate, x.speed)
                stream = BytesIO()
                np.save(stream, model(soxr.resample(samples, x.rate, RATE)).astype(np.float16))
                write_bytes(path, stream.getvalue())
        lines = {
            "text": [f"{x.id} {x.target}" for x in found],
            "feats.scp": [f"{x.id} {split}/feats/{x.id}.npy" for x in found],
        }
        for name, text in lines.items():
            write_bytes(output / split / name, "".join(f"{line}\n" for line in text).encode())


def pretrained(name: str, layer: str, device: str) -> Model:
    """The hidden states of a Hugging Face model.

    Args:
        name: the name or directory of the model.
        layer: the number of a layer (0: the input of the first one), or "mean" of all layers.
        device: the torch device.

    Raises:
        DataError: transformers is not installed.
    """
    try:
        from transformers import AutoModel
    except ImportError as error:
        raise DataError("transformers is not installed: pip install 'attnlab[hf]'") from error
    network = AutoModel.from_pretrained(name, use_safetensors=True).to(device).eval()

    @torch.inference_mode()
    def run(samples: Array) -> Array:
        x = torch.from_numpy(samples).to(device)[None]
        x = torch.nn.functional.layer_norm(x, x.shape[-1:])  # as the large models were trained
        states = network(x, output_hidden_states=True).hidden_states
        chosen = torch.stack(states).mean(0) if layer == "mean" else states[int(layer)]
        features: Array = chosen[0].float().cpu().numpy()
        return features

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
    parser.add_argument("--layer", default="mean", help="the number of a layer, or mean")
    parser.add_argument("--speeds", type=float, nargs="+", default=[0.9, 1.0, 1.1], help="speeds of the training split")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    if given.layer != "mean" and not given.layer.isdigit():
        parser.error(f"--layer={given.layer}: expected mean or an int")
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[StderrHandler()])
    try:
        model = pretrained(given.model, given.layer, given.device)
        extract(getattr(readers, given.reader)(), given.root, given.output, model, given.speeds)
    except AttnlabError as error:
        parser.exit(error.exit_code, f"error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(
            128 + signal.SIGINT, "error: interrupted; the same command continues with the files that are left\n"
        )


if __name__ == "__main__":
    main()
