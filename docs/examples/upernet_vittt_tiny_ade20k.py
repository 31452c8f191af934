"""mmsegmentation's own training of UperNet with a backbone of this project: `Runner.from_cfg(Config.fromfile(this
file)).train()`.

`repro segment` needs no such file. This one shows how a config of your own names the backbone; besides the model it has
Vision-RWKV's recipe for its tiny size, without the layer-wise decay of the learning rate, for which mmengine has no
rule for this backbone.
"""

custom_imports = dict(
    imports=["mmseg.models", "mmseg.datasets", "mmseg.evaluation", "repro.tasks.segmentation.mmseg_backbone"]
)
default_scope = "mmseg"

data_root = "data/ADEChallengeData2016"
weights = "weights.safetensors"  # of `repro pretrain`; None trains from scratch
crop_size = (512, 512)
dim = 192

sync_bn = "torch"  # for several processes; a single one uses plain batch norm
head = dict(num_classes=150, norm_cfg=dict(type="BN"), dropout_ratio=0.1, align_corners=False)
model = dict(
    type="EncoderDecoder",
    data_preprocessor=dict(
        type="SegDataPreProcessor",
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
        size=crop_size,
    ),
    backbone=dict(type="VitttAdapter", name="vittt_tiny_patch16_224", drop_path_rate=0.1, weights=weights),
    decode_head=dict(
        type="UPerHead",
        in_channels=[dim] * 4,
        in_index=[0, 1, 2, 3],
        channels=512,
        loss_decode=dict(type="CrossEntropyLoss", loss_weight=1.0),
        **head,
    ),
    auxiliary_head=dict(
        type="FCNHead",
        in_channels=dim,
        in_index=2,
        channels=256,
        num_convs=1,
        concat_input=False,
        loss_decode=dict(type="CrossEntropyLoss", loss_weight=0.4),
        **head,
    ),
    test_cfg=dict(mode="slide", crop_size=crop_size, stride=(341, 341)),
)

train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations"),
    dict(type="RandomResize", scale=(2048, 512), ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type="RandomCrop", crop_size=crop_size, cat_max_ratio=0.75),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PhotoMetricDistortion"),
    dict(type="PackSegInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(2048, 512), keep_ratio=True),
    dict(type="ResizeToMultiple", size_divisor=32),
    dict(type="LoadAnnotations"),
    dict(type="PackSegInputs"),
]
train_dataloader = dict(
    batch_size=2,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dict(
        type="ADE20KDataset",
        data_root=data_root,
        data_prefix=dict(img_path="images/training", seg_map_path="annotations/training"),
        pipeline=train_pipeline,
    ),
)
val_dataloader = test_dataloader = dict(
    batch_size=1,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        type="ADE20KDataset",
        data_root=data_root,
        data_prefix=dict(img_path="images/validation", seg_map_path="annotations/validation"),
        pipeline=test_pipeline,
    ),
)
val_evaluator = test_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])

train_cfg = dict(type="IterBasedTrainLoop", max_iters=160000, val_interval=16000)
val_cfg, test_cfg = dict(type="ValLoop"), dict(type="TestLoop")
optim_wrapper = dict(
    type="AmpOptimWrapper",
    optimizer=dict(type="AdamW", lr=12e-5, betas=(0.9, 0.999), weight_decay=0.01),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
    loss_scale=dict(init_scale=512.0),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type="PolyLR", power=1.0, eta_min=0.0, by_epoch=False, begin=1500, end=160000),
]
log_processor = dict(by_epoch=False)
default_hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=16000))
