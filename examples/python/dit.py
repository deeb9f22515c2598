"""DiT of diffusers, which learns to draw letters: trained with dovetail.fully_shard and torch's own AdamW.

    python examples/python/dit.py
    torchrun --nproc_per_node=2 examples/python/dit.py --format bf16 --save /tmp/dit

The images are the letters of the font that comes with Pillow, in many sizes.
"""

import string

import torch
import torch.distributed as dist
from diffusers import DDIMScheduler, DDPMScheduler, DiTTransformer2DModel
from PIL import Image, ImageDraw, ImageFont

import training
from dovetail import fully_shard

LETTERS = string.ascii_uppercase
SIDE = 16  # pixels
SHADES = " .:-=+*#%@"


def build() -> DiTTransformer2DModel:
    return DiTTransformer2DModel(
        num_attention_heads=3, attention_head_dim=32, in_channels=1, num_layers=3, sample_size=SIDE, patch_size=2,
        num_embeds_ada_norm=len(LETTERS), norm_num_groups=1)


def draw_letters() -> tuple[torch.Tensor, torch.Tensor]:
    """Images [n, 1, SIDE, SIDE] from -1 to 1, and which letter each is."""
    images, labels = [], []
    for quarter in range(4 * 11, 4 * 17):
        font = ImageFont.load_default(quarter / 4)
        for label, letter in enumerate(LETTERS):
            image = Image.new("L", (SIDE, SIDE))
            ImageDraw.Draw(image).text((SIDE / 2, SIDE / 2), letter, 255, font, anchor="mm")
            images.append(torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8))
            labels.append(label)
    return torch.stack(images).view(-1, 1, SIDE, SIDE) / 127.5 - 1, torch.tensor(labels)


@torch.no_grad()
def sample(model, letters: str, steps: int = 25) -> torch.Tensor:
    """Draws the letters, [SIDE, SIDE * letters]. Collective, with the same noise on every rank."""
    model.eval()
    labels = torch.tensor([LETTERS.index(letter) for letter in letters])
    images = torch.randn(len(letters), 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    scheduler = DDIMScheduler(prediction_type="sample", timestep_spacing="trailing", rescale_betas_zero_snr=True)
    scheduler.set_timesteps(steps)
    for t in scheduler.timesteps:
        predicted = model(images, t.expand(len(labels)), labels).sample.float()
        images = scheduler.step(predicted, t, images).prev_sample
    return torch.cat(list(images[:, 0]), dim=1).clamp(-1, 1)


def main() -> None:
    args = training.options(__doc__.splitlines()[0], steps=300, batch=32)
    training.start()
    model = build()
    # The model's own forward asks the first block's embedding of time and letter once more, outside of that block's
    # forward: as a unit of its own it is gathered there too.
    fully_shard(model.transformer_blocks[0].norm1.emb, format=args.format)
    for block in model.transformer_blocks:
        fully_shard(block, format=args.format)
    fully_shard(model, format=args.format)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)

    images, labels = draw_letters()
    validation = torch.arange(len(images)) % 10 == 0
    noising = DDPMScheduler(prediction_type="sample", rescale_betas_zero_snr=True)

    def loss_of(seed: int, validating: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        mine = torch.nonzero(validation == validating)[:, 0]
        at = mine[torch.randint(len(mine), (args.batch,), generator=generator)]
        noise = torch.randn(args.batch, 1, SIDE, SIDE, generator=generator)
        t = torch.randint(noising.config.num_train_timesteps, (args.batch,), generator=generator)
        noisy = noising.add_noise(images[at], noise, t)
        return torch.nn.functional.mse_loss(model(noisy, t, labels[at]).sample.float(), images[at])

    training.train(model, optimizer, loss_of, args, lambda loss: f"denoising loss {loss:.4f}")
    drawn = sample(model, "DOVETAIL")
    shades = ((drawn + 1) / 2 * (len(SHADES) - 1)).round().int()
    training.say("sample:\n" + "\n".join("".join(SHADES[i] for i in row) for row in shades.tolist()))
    training.save(args.save, model, optimizer)
    if args.save and dist.get_rank() == 0:
        Image.fromarray(((drawn + 1) * 127.5).byte().numpy()).save(args.save / "sample.png")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
