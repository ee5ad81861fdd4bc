"""Make runs and their pages (docs/report.md) in a folder.

    python docs/report_demo.py runs/report-demo [--pictures]

``--pictures`` also draws the pictures of docs/report.md, with chromium.

Six jobs of seconds each: pictures, boxes and documents by two checkpoints, answers, masks, texts. All is made
here but the pictures of clothes, which are the package's. Their training set is not: the lesser checkpoint
has seen 2,000 of the 10,000 test pictures once, and both are evaluated on the other 8,000.
"""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from torch.nn import functional

from dualeval.data.small_images import read_idx
from dualeval.models.sources.fashion_cnn import FashionCNN
from dualeval.tasks.image_data import ASSETS

DOCS = Path(__file__).resolve().parent
_LIMIT_S = 300
_NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix")
_THINGS = ("key", "map", "ring", "lamp", "boat", "letter", "coin", "drum")
_DEEDS = ("found", "lost", "sold", "painted", "hid")
_PRAISE, _BLAME = ("good", "great", "funny", "moving"), ("bad", "dull", "sad", "weak")
_KINDS = ("film", "book", "play")
_NETS = """
import torch
from scipy import ndimage
from torch import nn


def make(num_classes=3):
    return nn.Conv2d(3, num_classes, 5, padding=2)


class Boxes(nn.Module):
    def __init__(self):
        super().__init__()
        self.masks = make()

    def forward(self, pictures):
        return [self.find(each) for each in pictures]

    def find(self, picture):
        shares = self.masks(picture[None])[0].softmax(0)
        found = {"boxes": [], "scores": [], "labels": []}
        for label in (1, 2):
            pieces, _ = ndimage.label(shares.argmax(0).numpy() == label)
            for number, (rows, columns) in enumerate(ndimage.find_objects(pieces), 1):
                if (inside := torch.from_numpy(pieces == number)).sum() > 8:
                    found["boxes"].append([columns.start, rows.start, columns.stop, rows.stop])
                    found["scores"].append(float(shares[label][inside].mean()))
                    found["labels"].append(label)
        made = {name: torch.tensor(values, dtype=torch.float32) for name, values in found.items()}
        return {**made, "boxes": made["boxes"].reshape(-1, 4), "labels": made["labels"].long()}


def boxes():
    return Boxes()
"""


def evaluate(folder: Path, name: str, *words: str, report: bool = True) -> None:
    """Run ``dualeval run`` in the folder, with the page where it is asked for."""
    command = [sys.executable, "-m", "dualeval", "run", "--no-progress", "--fresh", *words]
    command += ["--out", name, *(["--report"] if report else [])]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=_LIMIT_S)


def clothes(folder: Path) -> None:
    """Fashion-MNIST by the network of the package, and by one that has seen little."""
    pictures = torch.from_numpy(read_idx(ASSETS / "t10k-images-idx3-ubyte.gz")[8000:])[:, None] / 255
    targets = torch.from_numpy(read_idx(ASSETS / "t10k-labels-idx1-ubyte.gz")[8000:].astype(np.int64))
    model = FashionCNN().train()
    train(
        model, [(each, target) for each, target in zip(pictures.sub(0.286) / 0.353, targets, strict=True)], 1
    )
    save_file(model.state_dict(), folder / "less.safetensors")
    common = ["--limit", "8000"]
    for metric in ("top1", "loss", "ece", "confusion"):
        common += ["--metric", metric]
    data = ("--model", "fashion-cnn", "--data", str(ASSETS), "--mean", "0.286", "--std", "0.353")
    evaluate(folder, "less", "--weights", "less.safetensors", *data, *common, report=False)
    evaluate(folder, "clothes", *common, report=False)
    command = [sys.executable, "-m", "dualeval", "report", "clothes", "--against", "less"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=_LIMIT_S)


def train(
    model: nn.Module,
    samples: list[Any],
    rounds: int,
    loss_of: Any = None,
    *,
    rate: float = 2e-3,
    size: int = 50,
) -> None:
    """Fit a model to samples of input and target, in a fixed order."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(rounds):
        for at in range(0, len(samples), size):
            inputs, targets = (torch.stack(each) for each in zip(*samples[at : at + size], strict=True))
            loss = loss_of(inputs, targets) if loss_of else functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def masks(folder: Path) -> None:
    """Discs and squares in noise, by one convolution; with boxes for the next."""
    draw = random.Random(0)
    noise = np.random.default_rng(0)
    made = []
    coco: dict[str, Any] = {"images": [], "annotations": []}
    coco["categories"] = [{"id": 1, "name": "disc"}, {"id": 2, "name": "square"}]
    for kind in ("img", "masks"):
        (folder / kind).mkdir(exist_ok=True)
    for number in range(180):
        picture, mask = Image.new("RGB", (96, 72), (70, 80, 90)), Image.new("L", (96, 72), 0)
        for label in (1, 2, 1, 2):
            x, y, size = draw.randrange(90), draw.randrange(66), draw.randrange(8, 30)
            box, colour = (x, y, x + size, y + size), (200, 90, 60) if label == 1 else (60, 140, 190)
            for canvas, fill in ((picture, colour), (mask, label)):
                pen = ImageDraw.Draw(canvas)
                (pen.ellipse if label == 1 else pen.rectangle)(box, fill=fill)
            left, wide, high = x, min(size + 1, 96 - x), min(size + 1, 72 - y)
            known = {"id": len(coco["annotations"]) + 1, "image_id": number + 1, "category_id": label}
            coco["annotations"].append(
                known | {"bbox": [left, y, wide, high], "area": wide * high, "iscrowd": 0}
            )
        values = np.asarray(picture, np.float32) + noise.normal(0, 45, (72, 96, 3))
        picture = Image.fromarray(values.clip(0, 255).astype(np.uint8))
        if number < 120:
            name = f"{number:03}.png"
            picture.save(folder / "img" / name)
            mask.save(folder / "masks" / name)
            coco["images"].append({"id": number + 1, "file_name": name, "width": 96, "height": 72})
        else:
            inputs = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) / 255
            made.append((inputs, torch.from_numpy(np.asarray(mask).astype(np.int64))))
    coco["annotations"] = [each for each in coco["annotations"] if each["image_id"] <= 120]
    (folder / "instances.json").write_text(json.dumps(coco), "utf-8")
    (folder / "nets.py").write_text(_NETS, "utf-8")
    model = nn.Conv2d(3, 3, 5, padding=2)
    for name, rounds in (("less", 2), ("masks", 6)):
        train(model, made, rounds, rate=0.03, size=6)
        torch.save(model.state_dict(), folder / f"{name}.pt")
        torch.save(
            {f"masks.{key}": value for key, value in model.state_dict().items()}, folder / f"{name}-boxes.pt"
        )
    words = ["--model", "nets:make", "--weights", "masks.pt", "--data", "img", "--masks", "masks"]
    words += ["--class-names", "background,disc,square", "--preprocessing", "none", "--keep-masks"]
    evaluate(folder, "masks", "--task", "segmentation", *words)


def boxes(folder: Path) -> None:
    """The same pictures, each piece of a mask an object, by both states of the convolution."""
    for name, weights in (("less-boxes", "less-boxes.pt"), ("boxes", "masks-boxes.pt")):
        words = ["--model", "nets:boxes", "--weights", weights, "--data", "img"]
        words += ["--annotations", "instances.json"]
        evaluate(folder, name, "--task", "detection", *words, report=False)
    command = [sys.executable, "-m", "dualeval", "report", "boxes", "--against", "less-boxes"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=_LIMIT_S)


def tokenizer() -> Any:
    """One token a word, for all that is written here."""
    words = ["The", "the", "is", "not", "very", "and", "Who", ".", "?"]
    words += [*_NAMES, *_THINGS, *_DEEDS, *_PRAISE, *_BLAME, *_KINDS]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate([*special, *words])}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, [("[CLS]", 2), ("[SEP]", 3)])
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=64,
        model_input_names=inputs,
        **dict(zip(names, special, strict=True)),
    )


def config(**more: Any) -> Any:
    """A BERT of two narrow layers."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    return transformers.BertConfig(vocab_size=100, max_position_embeddings=64, **sizes, **more)


def texts(folder: Path) -> None:
    """Praise and blame, some of it denied."""
    draw = random.Random(1)
    rows = []
    for _ in range(900):
        is_good, is_denied = draw.random() < 0.5, draw.random() < 0.4
        word = draw.choice(_PRAISE if is_good else _BLAME)
        more = f" and {draw.choice(_PRAISE if is_good else _BLAME)}" if draw.random() < 0.3 else ""
        before = ("not " if is_denied else "") + draw.choice(("very ", ""))
        kind = draw.choice(_KINDS)
        text = f"The {kind} is {before}{word}{more} ."
        is_praise = (is_good != is_denied) != (draw.random() < 0.06)  # some labels are wrong
        label = "praise" if is_praise else "blame"
        rows.append({"text": text, "label": label, "kind": kind, "denied": "yes" if is_denied else "no"})
    encode = tokenizer()
    kinds = ("blame", "praise")
    model: Any = transformers.BertForSequenceClassification(config(id2label=dict(enumerate(kinds))))
    seen = [
        (torch.tensor(encode(row["text"], padding="max_length", max_length=16)["input_ids"]), row["label"])
        for row in rows[:500]
    ]
    samples = [(ids, torch.tensor(kinds.index(label))) for ids, label in seen]

    def loss_of(ids: Any, kinds: Any) -> Any:
        return model(ids, attention_mask=(ids != 0).long(), labels=kinds).loss

    train(model, samples, 5, loss_of, size=20)
    save(model, encode, folder / "texts-model")
    lines = [json.dumps(row) for row in rows[500:]]
    (folder / "texts.jsonl").write_text("\n".join(lines), "utf-8")
    words = (
        "--model",
        "texts-model",
        "--data",
        "texts.jsonl",
        "--max-length",
        "32",
        "--by",
        "kind",
        "--by",
        "denied*kind",
    )
    evaluate(folder, "texts", "--task", "text-classification", *words)


def questions(folder: Path) -> None:
    """Who did what, in texts of three sentences."""
    draw = random.Random(2)
    encode = tokenizer()
    samples, asked = [], []
    for number in range(1600):
        names, things, deeds = draw.sample(_NAMES, 3), draw.sample(_THINGS, 3), draw.choices(_DEEDS, k=3)
        context = " ".join(f"{n} {d} the {t} ." for n, d, t in zip(names, deeds, things, strict=True))
        at = draw.randrange(3)
        question, answer = f"Who {deeds[at]} the {things[at]} ?", names[at]
        start = context.index(answer)
        inputs = encode(question, context, padding="max_length", max_length=32)
        place = torch.tensor(inputs.char_to_token(start, sequence_index=1))
        samples.append((torch.tensor([inputs["input_ids"], inputs["token_type_ids"]]), place))
        answers = [{"text": answer, "answer_start": start}]
        asked.append(
            {"context": context, "qas": [{"id": f"q{number}", "question": question, "answers": answers}]}
        )
    model: Any = transformers.BertForQuestionAnswering(config())

    def loss_of(inputs: Any, places: Any) -> Any:
        ids, kinds = inputs.unbind(1)
        ends = {"start_positions": places, "end_positions": places}
        return model(ids, attention_mask=(ids != 0).long(), token_type_ids=kinds, **ends).loss

    train(model, samples[:1400], 8, loss_of, size=20)
    save(model, encode, folder / "questions-model")
    data = {"version": "1.1", "data": [{"title": "Made", "paragraphs": asked[1400:]}]}
    (folder / "questions.json").write_text(json.dumps(data), "utf-8")
    words = ("--model", "questions-model", "--data", "questions.json", "--max-length", "48", "--stride", "8")
    evaluate(folder, "questions", "--task", "question-answering", *words)


def documents(folder: Path) -> None:
    """Stories by two states of a language model, with the loss of each word."""
    draw, encode = random.Random(0), tokenizer()
    stories = []
    for _ in range(900):
        name, thing, praise = draw.choice(_NAMES), draw.choice(_THINGS), draw.choice((*_PRAISE, *_BLAME))
        deeds = " ".join(f"{name} {draw.choice(_DEEDS)} the {thing}." for _ in range(draw.randrange(1, 4)))
        stories.append(f"{deeds} The {thing} is {praise}. {draw.choice(_NAMES)} is not {praise}.")
    config = transformers.GPT2Config(
        vocab_size=len(encode), n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=2, eos_token_id=3
    )
    model = transformers.GPT2LMHeadModel(config)
    made = encode([f"[CLS] {each}" for each in stories[:800]], add_special_tokens=False, padding="max_length")
    samples = [(ids, ids) for ids in torch.tensor(made["input_ids"])]
    rows = "".join(f"{json.dumps({'text': each})}\n" for each in stories[800:])
    (folder / "documents.jsonl").write_text(rows, "utf-8")

    def loss_of(inputs: Any, _: Any) -> Any:
        return model(inputs, labels=inputs.where(inputs > 0, -100)).loss

    encode.bos_token, encode.eos_token = "[CLS]", "[SEP]"
    for name, rounds in (("less-documents", 1), ("documents", 5)):
        train(model.train(), samples, rounds, loss_of, size=20, rate=4e-3)
        save(model, encode, folder / f"{name}-model")
        words = ["--model", f"{name}-model", "--data", "documents.jsonl", "--keep-losses"]
        evaluate(folder, name, "--task", "language-modeling", *words, report=False)
    command = [sys.executable, "-m", "dualeval", "report", "documents", "--against", "less-documents"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=_LIMIT_S)


def save(model: Any, encode: Any, folder: Path) -> None:
    """Write a model's folder as the library does."""
    model.eval().save_pretrained(folder)
    encode.save_pretrained(folder)


def draw_pictures(folder: Path) -> None:
    """Show the pages as a browser does."""
    from playwright.sync_api import sync_playwright

    shots = (
        ("report-light", "clothes", {"width": 1100, "height": 1530}, "light", None),
        ("report-dark", "clothes", {"width": 1100, "height": 800}, "dark", "#confusion"),
        ("report-boxes", "boxes", {"width": 1100, "height": 740}, "light", "#samples"),
        ("report-phone", "masks", {"width": 390, "height": 844}, "light", "#samples"),
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name, run, size, theme, place in shots:
            page = browser.new_context(viewport=size, color_scheme=theme).new_page()
            page.goto((folder / run / "report.html").absolute().as_uri())
            if place is not None:
                page.locator(place).evaluate("(element) => element.scrollIntoView()")
            with io.BytesIO(page.screenshot()) as file:
                # 128 colours: a third of the bytes.
                Image.open(file).convert("RGB").quantize(128).save(DOCS / f"{name}.png", optimize=True)
        browser.close()


def main() -> None:
    """Make all six, and say where the pages are."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # for models this small more are in each other's way
    for make in (clothes, questions, masks, boxes, texts, documents):
        torch.manual_seed(0)
        make(folder)
        print(folder / make.__name__ / "report.html", flush=True)
    if "--pictures" in sys.argv:
        draw_pictures(folder)


if __name__ == "__main__":
    main()
