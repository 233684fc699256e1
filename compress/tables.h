// Small tables for vector kernels. They replace pext and pdep, which some processors run as slow microcode.
#pragma once
#include <cstdint>

// For every 8-bit mask the places of its set bits, in order.
struct LcPlaces {
  uint8_t of[256][8];
  constexpr LcPlaces() : of() {
    for (int mask = 0; mask < 256; ++mask)
      for (int bit = 0, taken = 0; bit < 8; ++bit)
        if (mask >> bit & 1) of[mask][taken++] = (uint8_t)bit;
  }
};
constexpr LcPlaces LC_PLACES;

// Every byte with zeros between its bits.
struct LcSpread {
  uint16_t of[256];
  constexpr LcSpread() : of() {
    for (int byte = 0; byte < 256; ++byte)
      for (int bit = 0; bit < 8; ++bit) of[byte] = (uint16_t)(of[byte] | (byte >> bit & 1) << 2 * bit);
  }
};
constexpr LcSpread LC_SPREAD;
