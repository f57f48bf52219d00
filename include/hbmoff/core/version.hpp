// hbmoff's version, the one place it is written down; the build reads it from here.
#pragma once

// 10000 * major + 100 * minor + patch, so that no two versions collide below 100 minors or patches.
#define HBMOFF_VERSION 100  // 0.1.0

namespace hbmoff {

inline constexpr int version_major = HBMOFF_VERSION / 10000;
inline constexpr int version_minor = HBMOFF_VERSION / 100 % 100;
inline constexpr int version_patch = HBMOFF_VERSION % 100;

}  // namespace hbmoff
