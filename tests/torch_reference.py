"""The zoo's families once more, as PyTorch functions of a state dict: the reference."""

import math

import torch
import torch.nn.functional as F  # noqa: N812


def counted(sd, prefix):
    """How many numbered layers follow the prefix."""
    return len({key[len(prefix) :].split(".")[0] for key in sd if key.startswith(prefix)})


def bn(sd, name, x):
    stats = sd[f"{name}.running_mean"], sd[f"{name}.running_var"]
    return F.batch_norm(x, *stats, sd[f"{name}.weight"], sd[f"{name}.bias"], eps=1e-5)


def conv(sd, name, x, stride=1, padding=0):
    return F.conv2d(x, sd[f"{name}.weight"], sd.get(f"{name}.bias"), stride, padding)


def linear(sd, name, x):
    return F.linear(x, sd[f"{name}.weight"], sd.get(f"{name}.bias"))


def sparse(sd, name, x, axis=1):
    if f"{name}.threshold" not in sd:
        return x
    shape = [1] * x.ndim
    shape[axis] = -1
    mean = sd[f"{name}.running_mean"].view(shape)
    band = sd[f"{name}.threshold"] * sd[f"{name}.running_var"].sqrt().view(shape)
    return torch.where((x - mean).abs() < band, mean.expand_as(x), x)


def wide_resnet(sd, x):
    x = conv(sd, "conv1", x, 1, 1)
    for group in (1, 2, 3):
        for i in range(counted(sd, f"block{group}.layer.")):
            name, stride = f"block{group}.layer.{i}", 2 if group > 1 and i == 0 else 1
            active = F.relu(bn(sd, f"{name}.bn1", x))
            out = conv(sd, f"{name}.conv1", active, stride, 1)
            out = conv(sd, f"{name}.conv2", F.relu(bn(sd, f"{name}.bn2", out)), 1, 1)
            if f"{name}.convShortcut.weight" in sd:
                x = conv(sd, f"{name}.convShortcut", active, stride)
            x = x + out
    x = F.avg_pool2d(F.relu(bn(sd, "bn1", x)), 8).flatten(1)
    return linear(sd, "fc", x)


def asymmetric(sd, name, x, stride):
    return conv(sd, name, F.pad(x, (1, 1, 1, 1) if stride == 1 else (0, 1, 0, 1)), stride)


def dm_wide_resnet(sd, x):
    x = conv(sd, "init_conv", x, 1, 1)
    for group in range(3):
        for i in range(counted(sd, f"layer.{group}.block.")):
            name, stride = f"layer.{group}.block.{i}", 2 if group and i == 0 else 1
            active = sparse(sd, f"{name}.meansparse_0", bn(sd, f"{name}.batchnorm_0", x))
            active = F.silu(active)
            out = bn(sd, f"{name}.batchnorm_1", asymmetric(sd, f"{name}.conv_0", active, stride))
            out = F.silu(sparse(sd, f"{name}.meansparse_1", out))
            out = conv(sd, f"{name}.conv_1", out, 1, 1)
            if f"{name}.shortcut.weight" in sd:
                x = conv(sd, f"{name}.shortcut", active, stride)
            x = sparse(sd, f"{name}.meansparse_2", x + out)
    x = F.silu(sparse(sd, "meansparse_end", bn(sd, "batchnorm", x)))
    return linear(sd, "logits", F.avg_pool2d(x, 8).flatten(1))


def dm_preact_resnet(sd, x):
    x = conv(sd, "conv_2d", x, 1, 1)
    for stage in range(4):
        for i in range(counted(sd, f"layer_{stage}.")):
            name, stride = f"layer_{stage}.{i}", 2 if stage and i == 0 else 1
            out = F.silu(bn(sd, f"{name}.batchnorm_0", x))
            out = asymmetric(sd, f"{name}.conv_2d_1", out, stride)
            out = conv(sd, f"{name}.conv_2d_2", F.silu(bn(sd, f"{name}.batchnorm_1", out)), 1, 1)
            if f"{name}.shortcut.weight" in sd:
                x = asymmetric(sd, f"{name}.shortcut", x, stride)
            x = x + out
    x = F.silu(bn(sd, "batchnorm", x))
    return linear(sd, "logits", F.avg_pool2d(x, 4).flatten(1))


def preact_resnet(sd, x, activated_shortcut):
    x = conv(sd, "conv1", x, 1, 1)
    for stage in (1, 2, 3, 4):
        for i in range(counted(sd, f"layer{stage}.")):
            name, stride = f"layer{stage}.{i}", 2 if stage > 1 and i == 0 else 1
            active = F.relu(bn(sd, f"{name}.bn1", x))
            out = conv(sd, f"{name}.conv1", active, stride, 1)
            out = conv(sd, f"{name}.conv2", F.relu(bn(sd, f"{name}.bn2", out)), 1, 1)
            if f"{name}.shortcut.0.weight" in sd:
                source = active if activated_shortcut else x
                x = conv(sd, f"{name}.shortcut.0", source, stride)
            x = x + out
    x = F.relu(bn(sd, "bn", x)) if "bn.weight" in sd else x
    return linear(sd, "linear", F.avg_pool2d(x, 4).flatten(1))


def residual(sd, x, skip):
    for stage in (1, 2, 3, 4):
        for i in range(counted(sd, f"layer{stage}.")):
            name, stride = f"layer{stage}.{i}", 2 if stage > 1 and i == 0 else 1
            if f"{name}.conv3.weight" in sd:
                out = F.relu(bn(sd, f"{name}.bn1", conv(sd, f"{name}.conv1", x)))
                out = F.relu(bn(sd, f"{name}.bn2", conv(sd, f"{name}.conv2", out, stride, 1)))
                out = bn(sd, f"{name}.bn3", conv(sd, f"{name}.conv3", out))
            else:
                out = F.relu(bn(sd, f"{name}.bn1", conv(sd, f"{name}.conv1", x, stride, 1)))
                out = bn(sd, f"{name}.bn2", conv(sd, f"{name}.conv2", out, 1, 1))
            if f"{name}.{skip}.0.weight" in sd:
                x = bn(sd, f"{name}.{skip}.1", conv(sd, f"{name}.{skip}.0", x, stride))
            x = F.relu(x + out)
    return x


def resnet(sd, x):
    x = F.relu(bn(sd, "bn1", conv(sd, "conv1", x, 1, 1)))
    return linear(sd, "linear", F.avg_pool2d(residual(sd, x, "shortcut"), 4).flatten(1))


def torchvision_resnet(sd, x):
    if sd["conv1.weight"].shape[-1] == 7:
        x = F.relu(bn(sd, "bn1", conv(sd, "conv1", x, 2, 3)))
        x = F.max_pool2d(x, 3, 2, 1)
    else:
        x = F.relu(bn(sd, "bn1", conv(sd, "conv1", x, 1, 1)))
    return linear(sd, "fc", residual(sd, x, "downsample").mean((2, 3)))


def vgg16(sd, x):
    index, step = 0, 3 if "features.1.weight" in sd else 2
    for convolutions in (2, 2, 3, 3, 3):
        for _ in range(convolutions):
            x = conv(sd, f"features.{index}", x, 1, 1)
            x = F.relu(bn(sd, f"features.{index + 1}", x) if step == 3 else x)
            index += step
        x = F.max_pool2d(x, 2)
        index += 1
    if "classifier.weight" in sd:
        return linear(sd, "classifier", x.flatten(1))
    x = F.adaptive_avg_pool2d(x, 7).flatten(1)
    x = F.relu(linear(sd, "classifier.0", x))
    return linear(sd, "classifier.6", F.relu(linear(sd, "classifier.3", x)))


def norm(sd, name, x, eps):
    return F.layer_norm(x, x.shape[-1:], sd[f"{name}.weight"], sd[f"{name}.bias"], eps)


def channel_norm(sd, name, x):
    return norm(sd, name, x.movedim(1, -1), 1e-6).movedim(-1, 1)


def mlp(sd, name, x):
    x = F.gelu(sparse(sd, f"{name}.meansparse1", linear(sd, f"{name}.fc1", x), -1))
    return sparse(sd, f"{name}.meansparse2", linear(sd, f"{name}.fc2", x), -1)


def stem(sd, name, x, strides):
    for i, stride in enumerate(strides):
        x = conv(sd, f"{name}.{3 * i}", x, stride, 1)
        x = F.gelu(channel_norm(sd, f"{name}.{3 * i + 1}", x))
    last = f"{name}.{3 * len(strides)}"
    return conv(sd, last, x) if f"{last}.weight" in sd else x


def convnext(sd, x):
    if "stem.0.weight" in sd:
        x = channel_norm(sd, "stem.1", conv(sd, "stem.0", x, 4))
    else:
        x = stem(sd, "stem.stem", x, (2, 2, 1) if "stem.stem.6.weight" in sd else (2, 2))
    for stage in range(4):
        if stage:
            x = channel_norm(sd, f"stages.{stage}.downsample.0", x)
            x = conv(sd, f"stages.{stage}.downsample.1", x, 2)
        for i in range(counted(sd, f"stages.{stage}.blocks.")):
            name = f"stages.{stage}.blocks.{i}"
            dw = f"{name}.conv_dw"
            out = F.conv2d(x, sd[f"{dw}.weight"], sd[f"{dw}.bias"], 1, 3, groups=x.shape[1])
            out = mlp(sd, f"{name}.mlp", norm(sd, f"{name}.norm", out.movedim(1, -1), 1e-6))
            x = x + (out * sd[f"{name}.gamma"]).movedim(-1, 1)
    return linear(sd, "head.fc", norm(sd, "head.norm", x.mean((2, 3)), 1e-6))


def attend(sd, name, x, heads, bias=0.0):
    *batch, tokens, width = x.shape
    q, k, v = (
        part.reshape(*batch, tokens, heads, width // heads).transpose(-2, -3)
        for part in linear(sd, f"{name}.qkv", x).chunk(3, dim=-1)
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(width // heads) + bias
    out = scores.softmax(-1) @ v
    return linear(sd, f"{name}.proj", out.transpose(-2, -3).reshape(*batch, tokens, width))


def vit(sd, x, heads):
    if "patch_embed.proj.weight" in sd:
        x = conv(sd, "patch_embed.proj", x, 16)
    else:
        x = stem(sd, "patch_embed.proj.stem", x, (2, 2, 2, 2))
    x = x.flatten(2).transpose(1, 2)
    x = torch.cat([sd["cls_token"].expand(len(x), -1, -1), x], 1) + sd["pos_embed"]
    for i in range(counted(sd, "blocks.")):
        name = f"blocks.{i}"
        x = x + attend(sd, f"{name}.attn", norm(sd, f"{name}.norm1", x, 1e-6), heads)
        x = x + mlp(sd, f"{name}.mlp", norm(sd, f"{name}.norm2", x, 1e-6))
    return linear(sd, "head", norm(sd, "norm", x, 1e-6)[:, 0])


def windows(x, size):
    n, height, width, channels = x.shape
    x = x.unfold(1, size, size).unfold(2, size, size).permute(0, 1, 2, 4, 5, 3)
    return x.reshape(n, height // size * (width // size), size * size, channels)


def swin(sd, x, window, layout):
    eps = 1e-5 if layout == "timm" else 1e-6
    x = conv(sd, "patch_embed.proj", x, 4).movedim(1, -1)
    x = norm(sd, "patch_embed.norm", x, eps)
    for stage in range(4):
        if layout == "timm" and stage:
            x = merge(sd, f"layers.{stage}.downsample", x, eps)
        for i in range(counted(sd, f"layers.{stage}.blocks.")):
            x = swin_block(sd, f"layers.{stage}.blocks.{i}", x, window, i % 2, eps)
        if layout == "microsoft" and stage < 3:
            x = merge(sd, f"layers.{stage}.downsample", x, eps)
    x = norm(sd, "norm", x, eps).mean((1, 2))
    return linear(sd, "head.fc" if layout == "timm" else "head", x)


def merge(sd, name, x, eps):
    corners = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
    return linear(sd, f"{name}.reduction", norm(sd, f"{name}.norm", torch.cat(corners, -1), eps))


def swin_block(sd, name, x, window, odd, eps):
    grid = x.shape[1]
    window = min(window, grid)
    shift = window // 2 if odd and window < grid else 0
    table = sd[f"{name}.attn.relative_position_bias_table"]
    place = torch.stack(torch.meshgrid(*[torch.arange(window)] * 2, indexing="ij")).flatten(1)
    apart = place[:, :, None] - place[:, None, :] + window - 1
    bias = table[apart[0] * (2 * window - 1) + apart[1]].permute(2, 0, 1)
    if shift:
        side = torch.zeros(grid, dtype=torch.long)
        side[-window:], side[-shift:] = 1, 2
        region = windows((side[:, None] * 3 + side)[None, :, :, None].double(), window)[0, :, :, 0]
        bias = bias + torch.where(region[:, None, :, None] != region[:, None, None, :], -100.0, 0.0)
    out = norm(sd, f"{name}.norm1", x, eps).roll((-shift, -shift), (1, 2))
    out = attend(sd, f"{name}.attn", windows(out, window), table.shape[1], bias)
    n, tiles = len(x), grid // window
    out = out.reshape(n, tiles, tiles, window, window, -1).transpose(2, 3).reshape(x.shape)
    x = sparse(sd, f"{name}.meansparse1", x + out.roll((shift, shift), (1, 2)), -1)
    x = x + mlp(sd, f"{name}.mlp", norm(sd, f"{name}.norm2", x, eps))
    return sparse(sd, f"{name}.meansparse2", x, -1)


def standardize(x):
    """Ding et al.'s normalisation; torch's std is the unbiased one."""
    flat = x.flatten(1)
    floor = 1 / math.sqrt(flat.shape[1])
    centred = flat - flat.mean(1, keepdim=True)
    return (centred / flat.std(1, keepdim=True).clamp(min=floor)).view(x.shape)
