"""Tiny networks of transformers that find objects, each in a folder with its image processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

_LABELS = {0: "cat", 1: "Red_Dog", 2: "fox", 3: "tree"}
_SHORTEST = {"shortest_edge": 64, "longest_edge": 96}
_SQUARE = {"height": 64, "width": 64}
_HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}


def _resnet(stages: tuple[str, ...]) -> dict[str, Any]:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=[*stages]
    )
    return {
        "backbone_config": config,
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
    }


def _small(**more: Any) -> dict[str, Any]:
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    return {"d_model": 16, "num_queries": 12, "num_labels": 4} | _HEADS | layers | more


_SMALL_BACKBONE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 64,
    "patch_size": 16,
    "out_indices": [1, 2],
}


def _of_windows(backbone: Any) -> dict[str, Any]:
    heads = {"decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 2}
    sizes = {"d_model": 16, "decoder_ffn_dim": 16, "decoder_layers": 1, "decoder_n_points": 2}
    return {
        "backbone_config": backbone,
        "num_queries": 12,
        "group_detr": 1,
        "num_labels": 4,
        **heads,
        **sizes,
    }


def _rt(kind: str) -> Any:
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    if kind == "DFine":
        backbone = transformers.HGNetV2Config(
            stage_in_channels=[8, 8, 16, 16],
            stage_mid_channels=[8, 8, 8, 8],
            stage_out_channels=[8, 16, 16, 16],
            stage_num_blocks=[1, 1, 1, 1],
            stage_numb_of_layers=[1, 1, 1, 1],
            stem_channels=[3, 8, 8],
            hidden_sizes=[8, 16, 16, 16],
            depths=[1, 1, 1, 1],
            out_features=["stage2", "stage3", "stage4"],
        )
    channels = [8, 16, 16] if kind != "DFine" else [16, 16, 16]
    return getattr(transformers, f"{kind}Config")(
        backbone_config=backbone,
        encoder_hidden_dim=16,
        encoder_in_channels=channels,
        feat_strides=[8, 16, 32],
        encoder_layers=1,
        encoder_ffn_dim=16,
        d_model=16,
        num_queries=12,
        decoder_in_channels=[16, 16, 16],
        decoder_ffn_dim=16,
        decoder_layers=2,
        decoder_n_points=[2, 2, 2] if kind == "DFine" else 2,
        num_labels=4,
        anchor_image_size=None,
        **_HEADS,
    )


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "detr": lambda: (
        transformers.DetrConfig(**_small(**_resnet(("stage4",)))),
        transformers.DetrImageProcessor(size=_SHORTEST),
    ),
    "conditional": lambda: (
        transformers.ConditionalDetrConfig(**_small(**_resnet(("stage4",)))),
        transformers.ConditionalDetrImageProcessor(size=_SHORTEST),
    ),
    "deformable": lambda: (
        transformers.DeformableDetrConfig(
            **_small(**_resnet(("stage2", "stage3", "stage4")), d_model=32, decoder_layers=2),
            num_feature_levels=3,
            encoder_n_points=2,
            decoder_n_points=2,
            disable_custom_kernels=True,
        ),
        transformers.DeformableDetrImageProcessor(size=_SHORTEST),
    ),
    "rt_detr": lambda: (_rt("RTDetr"), transformers.RTDetrImageProcessor(size=_SQUARE)),
    "rt_detr_v2": lambda: (_rt("RTDetrV2"), transformers.RTDetrImageProcessor(size=_SQUARE)),
    "d_fine": lambda: (_rt("DFine"), transformers.RTDetrImageProcessor(size=_SQUARE)),
    "lw_detr": lambda: (
        transformers.LwDetrConfig(
            **_of_windows(
                transformers.LwDetrViTConfig(
                    window_block_indices=[0], pretrain_image_size=64, num_windows=4, **_SMALL_BACKBONE
                )
            ),
            projector_scale_factors=[1.0],
        ),
        transformers.DeformableDetrImageProcessor(size=_SQUARE),
    ),
    "rf_detr": lambda: (
        transformers.RfDetrConfig(
            **_of_windows(transformers.RfDetrDinov2Config(num_windows=2, **_SMALL_BACKBONE)),
            intermediate_size=16,
        ),
        transformers.RfDetrImageProcessor(size=_SQUARE),
    ),
    "yolos": lambda: (
        transformers.YolosConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=[64, 96],
            patch_size=16,
            num_detection_tokens=12,
            num_labels=4,
        ),
        transformers.YolosImageProcessor(size=_SHORTEST),
    ),
}


def _mask2former() -> tuple[Any, Any]:
    backbone = transformers.SwinConfig(
        image_size=64,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 1, 1],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=8,
        num_labels=4,
    )
    return config, transformers.Mask2FormerImageProcessor(size=_SHORTEST, size_divisor=32)


def write_detector(folder: Path, family: str, *, seed: int = 0) -> Path:
    """Write a network with drawn weights and its processor; "mask2former" gives masks."""
    config, processor = _mask2former() if family == "mask2former" else FAMILIES[family]()
    config.id2label = _LABELS
    config.label2id = {name: label for label, name in _LABELS.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = "UniversalSegmentation" if family == "mask2former" else "ObjectDetection"
        model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
