# SPDX-License-Identifier: Apache-2.0
"""Steps of training a diffusion transformer of diffusers by flow matching. The attention backend is an argument."""

import argparse

import torch
from diffusers import FluxTransformer2DModel


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="native", help="diffusers' attention backend")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    ).to(device).train()  # fmt: skip
    model.set_attention_backend(arguments.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    latents, text, pooled = torch.randn(2, 16, 4).to(device), torch.randn(2, 8, 32).to(device), torch.randn(2, 32).to(device)
    places = {"img_ids": torch.randn(16, 3).to(device), "txt_ids": torch.randn(8, 3).to(device)}
    noise, t = torch.randn(2, 16, 4).to(device), torch.rand(2).to(device)
    noisy = (1 - t)[:, None, None] * latents + t[:, None, None] * noise
    for step in range(6):
        found = model(noisy, encoder_hidden_states=text, pooled_projections=pooled, timestep=t, return_dict=False, **places)[0]
        loss = torch.nn.functional.mse_loss(found, noise - latents)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
