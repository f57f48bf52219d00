// The file that --save writes and --resume reads: a JSON header and named tensors; it is there whole or not at all.
//
// Layout (little-endian):
//   "HBMGPT\r\n"                       8 bytes; a transfer that changes line ends breaks it
//   version                            uint64, 1
//   the tensors' elements              one tensor after another, each padded with zeros to a multiple of 64 bytes
//   JSON                               {"header": {...}, "tensors": [{name, dtype, count, offset}, ...]}
//   length of the JSON                 uint64
//   CRC-32 of everything before it     uint64
// The header comes last because only then is it known, and the elements need not be held in memory twice. No time, host
// name or path of the file itself is stored: the same training state gives the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "hbmoff/core/dtype.hpp"
#include "hbmoff/core/units.hpp"

namespace gpt {

/// Where a checkpoint is written before it takes the place of `file`.
[[nodiscard]] std::filesystem::path partial_of(std::filesystem::path file);

/// \throws BadInput when `file` could not be saved to: its folder is missing or cannot be written, or it exists and is
///         not a regular file. For a clear word before hours of training, not a guarantee.
void check_saveable(const std::filesystem::path& file);

/// Writes a checkpoint beside `file` (as `file` + ".partial") and puts it in place only once it is whole and on disk.
/// Whatever fails before that, the file that was there stays as it was.
class CheckpointWriter {
 public:
  /// \throws hbmoff::IoError when the file beside cannot be created
  explicit CheckpointWriter(const std::filesystem::path& file);
  /// Without `commit`: removes what was written.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Begins a tensor of `count` elements; its elements follow by `append`, in as many pieces as is handy. The tensor
  /// before it must be complete, its name unused.
  void begin(std::string_view name, hbmoff::DType dtype, std::uint64_t count);
  /// \throws hbmoff::IoError
  void append(std::span<const std::byte> bytes);
  /// A whole tensor at once.
  template <class T>
  void add(std::string_view name, std::span<const T> elements) {
    begin(name, hbmoff::dtype_of<T>, elements.size());
    append(std::as_bytes(elements));
  }
  /// Writes the header, brings everything to disk and replaces the file.
  /// \returns the size of the file
  /// \throws hbmoff::IoError
  hbmoff::Bytes commit(const nlohmann::json& header);

 private:
  void write(const void* data, std::uint64_t size);
  void flush();

  std::filesystem::path file_, partial_;
  int descriptor_ = -1;
  std::vector<std::byte> buffer_;  // what is not written yet; pieces come small
  std::uint64_t offset_ = 0;  // bytes so far, buffered ones included
  std::uint64_t missing_ = 0;  // bytes that the tensor begun last still lacks
  std::uint32_t checksum_ = 0;  // of what is before offset_
  nlohmann::json tensors_ = nlohmann::json::array();
  std::set<std::string> names_;
};

/// Reads a checkpoint. The whole file is checked when it is opened; nothing of a damaged one is ever handed out.
class CheckpointReader {
 public:
  struct Tensor {
    std::string name;
    hbmoff::DType dtype = hbmoff::DType::fp32;
    std::uint64_t count = 0;
    std::uint64_t offset = 0;  ///< of its first byte in the file
  };

  /// \throws BadInput missing, unreadable, not such a file, of another version, truncated, altered
  explicit CheckpointReader(const std::filesystem::path& file);
  ~CheckpointReader();
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  [[nodiscard]] const nlohmann::json& header() const { return header_; }
  [[nodiscard]] const std::vector<Tensor>& tensors() const { return tensors_; }
  /// Reads the elements of tensor `name`, all of them, or as many as `elements` holds from element `first` on.
  /// \throws BadInput when there is no such tensor of this type with so many elements, or reading fails
  template <class T>
  void read(std::string_view name, std::span<T> elements, std::uint64_t first = 0) const {
    read_bytes(name, hbmoff::dtype_of<T>, first, elements.size(), std::as_writable_bytes(elements));
  }
  /// \throws BadInput when there is no tensor `name` with this type and count
  const Tensor& require(std::string_view name, hbmoff::DType dtype, std::uint64_t count) const;

 private:
  void read_bytes(std::string_view name, hbmoff::DType dtype, std::uint64_t first, std::uint64_t count,
                  std::span<std::byte> bytes) const;
  void read_at(std::uint64_t offset, void* into, std::uint64_t size) const;
  void load();
  [[noreturn]] void refuse(const std::string& what) const;

  std::string path_;
  int descriptor_ = -1;
  nlohmann::json header_;
  std::vector<Tensor> tensors_;
};

}  // namespace gpt
