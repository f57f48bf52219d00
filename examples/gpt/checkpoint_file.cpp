// Writing and reading the checkpoint file.
#include "checkpoint_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <optional>
#include <system_error>

#include "hbmoff/core/error.hpp"
#include "options.hpp"

namespace gpt {
namespace {

namespace fs = std::filesystem;
using hbmoff::Bytes;
using hbmoff::DType;

static_assert(std::endian::native == std::endian::little, "the file is little-endian");

constexpr std::array<char, 8> magic = {'H', 'B', 'M', 'G', 'P', 'T', '\r', '\n'};
constexpr std::uint64_t format_version = 1;
constexpr std::uint64_t prefix_bytes = 16;  // magic, version
constexpr std::uint64_t suffix_bytes = 16;  // length of the JSON, checksum
constexpr std::uint64_t alignment = 64;
constexpr std::size_t buffer_bytes = 1u << 20;

std::uint32_t add_to_checksum(std::uint32_t checksum, const void* data, std::size_t size) {
  return static_cast<std::uint32_t>(::crc32_z(checksum, static_cast<const Bytef*>(data), size));
}

[[noreturn]] void fail_write(const fs::path& file, const char* what) {
  const int reason = errno;
  throw hbmoff::IoError{file.string() + ": " + what + " failed: " + std::strerror(reason)};
}

void write_whole(int descriptor, const std::byte* data, std::size_t size, const fs::path& file) {
  while (size != 0) {
    const ssize_t written = ::write(descriptor, data, size);
    if (written < 0) {
      if (errno == EINTR) continue;
      fail_write(file, "writing");
    }
    data += written;
    size -= static_cast<std::size_t>(written);
  }
}

std::optional<DType> dtype_named(std::string_view name) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
    if (name == to_string(dtype)) return dtype;
  }
  return std::nullopt;
}

fs::path folder_of(const fs::path& file) { return file.has_parent_path() ? file.parent_path() : fs::path{"."}; }

}  // namespace

fs::path partial_of(fs::path file) { return file += ".partial"; }

void check_saveable(const fs::path& file) {
  const auto refuse = [&](const std::string& what) { throw BadInput{"--save: " + file.string() + " " + what}; };
  std::error_code error;
  const fs::file_status status = fs::status(file, error);
  if (fs::exists(status) && !fs::is_regular_file(status)) refuse("is not a regular file");
  if (file.filename().empty()) refuse("names no file");
  const fs::path folder = folder_of(file);
  if (!fs::is_directory(folder, error)) refuse("cannot be written: there is no folder " + folder.string());
  const fs::path partial = partial_of(file);
  const int descriptor = ::open(partial.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor < 0) refuse(std::string{"cannot be written: "} + std::strerror(errno));
  ::close(descriptor);
  ::unlink(partial.c_str());
}

CheckpointWriter::CheckpointWriter(const fs::path& file) : file_{file} {
  // Through a link the file it names is replaced, not the link.
  std::error_code error;
  if (fs::is_symlink(fs::symlink_status(file, error))) file_ = fs::weakly_canonical(file);
  if (fs::exists(file_, error) && !fs::is_regular_file(file_, error)) {
    throw hbmoff::IoError{file_.string() + ": is not a regular file"};
  }
  partial_ = partial_of(file_);
  buffer_.reserve(buffer_bytes);
  descriptor_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail_write(partial_, "creating it");
  write(magic.data(), magic.size());
  write(&format_version, sizeof format_version);
}

CheckpointWriter::~CheckpointWriter() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(partial_.c_str());
}

void CheckpointWriter::write(const void* data, std::uint64_t size) {
  if (size == 0) return;  // and crc32 of a null pointer would start anew
  const auto* bytes = static_cast<const std::byte*>(data);
  checksum_ = add_to_checksum(checksum_, bytes, size);
  offset_ += size;
  if (buffer_.size() + size > buffer_bytes) flush();
  if (size > buffer_bytes) {
    write_whole(descriptor_, bytes, size, partial_);
  } else {
    buffer_.insert(buffer_.end(), bytes, bytes + size);
  }
}

void CheckpointWriter::flush() {
  write_whole(descriptor_, buffer_.data(), buffer_.size(), partial_);
  buffer_.clear();
}

void CheckpointWriter::begin(std::string_view name, DType dtype, std::uint64_t count) {
  if (missing_ != 0) throw hbmoff::InvalidArgument{"the tensor before " + std::string{name} + " is not complete"};
  if (!names_.emplace(name).second) throw hbmoff::InvalidArgument{std::string{name} + " is in the file already"};
  constexpr std::array<char, alignment> zeros{};
  write(zeros.data(), hbmoff::round_up(offset_, alignment) - offset_);
  tensors_.push_back({{"name", name}, {"dtype", to_string(dtype)}, {"count", count}, {"offset", offset_}});
  missing_ = (size_of(dtype) * count).count();
}

void CheckpointWriter::append(std::span<const std::byte> bytes) {
  if (bytes.size() > missing_) throw hbmoff::InvalidArgument{"more elements than the tensor was begun with"};
  write(bytes.data(), bytes.size());
  missing_ -= bytes.size();
}

Bytes CheckpointWriter::commit(const nlohmann::json& header) {
  if (missing_ != 0) throw hbmoff::InvalidArgument{"the last tensor is not complete"};
  if (descriptor_ < 0) throw hbmoff::InvalidArgument{"the checkpoint was committed already"};
  const std::string json = nlohmann::json{{"header", header}, {"tensors", tensors_}}.dump(
      -1, ' ', false, nlohmann::json::error_handler_t::replace);
  const std::uint64_t json_bytes = json.size();
  write(json.data(), json.size());
  write(&json_bytes, sizeof json_bytes);
  const std::uint64_t checksum = checksum_;
  write(&checksum, sizeof checksum);
  flush();
  if (::fsync(descriptor_) != 0) fail_write(partial_, "bringing it to disk");
  const int descriptor = std::exchange(descriptor_, -1);
  if (::close(descriptor) != 0 || ::rename(partial_.c_str(), file_.c_str()) != 0) {
    const int reason = errno;
    ::unlink(partial_.c_str());
    errno = reason;
    fail_write(file_, "putting the new file in place");
  }
  // The new name must survive a power cut too.
  const int folder = ::open(folder_of(file_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    ::fsync(folder);  // some file systems have no such call for folders; the file itself is on disk
    ::close(folder);
  }
  return Bytes{offset_};
}

CheckpointReader::CheckpointReader(const fs::path& file) : path_{file.string()} {
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor_ < 0) refuse(std::string{"cannot be opened: "} + std::strerror(errno));
  try {
    load();
  } catch (...) {
    ::close(descriptor_);  // no destructor runs when a constructor throws
    throw;
  }
}

void CheckpointReader::load() {
  struct stat status{};
  if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) refuse("is not a regular file");
  const auto size = static_cast<std::uint64_t>(status.st_size);
  struct {
    std::array<char, 8> magic;
    std::uint64_t version;
  } prefix{};
  static_assert(sizeof prefix == prefix_bytes);
  if (size >= prefix_bytes) read_at(0, &prefix, prefix_bytes);
  if (prefix.magic != magic) refuse("is not a file that train_gpt saved");
  if (prefix.version != format_version) {
    refuse("is of format version " + std::to_string(prefix.version) + ", this program reads version " +
           std::to_string(format_version));
  }

  const std::string damaged = "is damaged: truncated or altered since it was saved";
  struct {
    std::uint64_t json_bytes, checksum;
  } suffix{};
  static_assert(sizeof suffix == suffix_bytes);
  if (size < prefix_bytes + suffix_bytes) refuse(damaged);
  read_at(size - suffix_bytes, &suffix, suffix_bytes);
  std::vector<std::byte> buffer(buffer_bytes);
  std::uint32_t checksum = 0;
  for (std::uint64_t at = 0, end = size - sizeof suffix.checksum; at < end;) {
    const std::uint64_t count = std::min<std::uint64_t>(buffer.size(), end - at);
    read_at(at, buffer.data(), count);
    checksum = add_to_checksum(checksum, buffer.data(), count);
    at += count;
  }
  if (checksum != suffix.checksum || suffix.json_bytes > size - prefix_bytes - suffix_bytes) refuse(damaged);

  const std::uint64_t json_start = size - suffix_bytes - suffix.json_bytes;
  std::string text(suffix.json_bytes, '\0');
  read_at(json_start, text.data(), text.size());
  try {
    nlohmann::json json = nlohmann::json::parse(text);
    header_ = std::move(json.at("header"));
    for (const nlohmann::json& entry : json.at("tensors")) {
      const std::optional<DType> dtype = dtype_named(entry.at("dtype").get<std::string>());
      Tensor tensor{.name = entry.at("name").get<std::string>(),
                    .dtype = dtype.value_or(DType::fp32),
                    .count = entry.at("count").get<std::uint64_t>(),
                    .offset = entry.at("offset").get<std::uint64_t>()};
      if (!dtype || tensor.offset < prefix_bytes || tensor.offset > json_start ||
          tensor.count > (json_start - tensor.offset) / size_of(*dtype).count()) {
        refuse("its tensor " + tensor.name + " is of no known type or not inside the file");
      }
      tensors_.push_back(std::move(tensor));
    }
  } catch (const nlohmann::json::exception& error) {
    refuse(std::string{"its header cannot be read: "} + error.what());
  }
}

void CheckpointReader::refuse(const std::string& what) const { throw BadInput{path_ + ": " + what}; }

CheckpointReader::~CheckpointReader() { ::close(descriptor_); }

void CheckpointReader::read_at(std::uint64_t offset, void* into, std::uint64_t size) const {
  auto* bytes = static_cast<std::byte*>(into);
  while (size != 0) {
    const ssize_t count = ::pread(descriptor_, bytes, size, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) refuse(std::string{"cannot be read: "} + std::strerror(errno));
    if (count == 0) refuse("became shorter while it was read");
    bytes += count;
    offset += static_cast<std::uint64_t>(count);
    size -= static_cast<std::uint64_t>(count);
  }
}

const CheckpointReader::Tensor& CheckpointReader::require(std::string_view name, DType dtype,
                                                          std::uint64_t count) const {
  const auto tensor = std::ranges::find(tensors_, name, &Tensor::name);
  if (tensor == tensors_.end()) refuse("holds no tensor " + std::string{name});
  if (tensor->dtype != dtype || tensor->count != count) {
    refuse("its tensor " + std::string{name} + " has " + std::to_string(tensor->count) + " elements of " +
           std::string{to_string(tensor->dtype)} + ", not " + std::to_string(count) + " of " +
           std::string{to_string(dtype)});
  }
  return *tensor;
}

void CheckpointReader::read_bytes(std::string_view name, DType dtype, std::uint64_t first, std::uint64_t count,
                                  std::span<std::byte> bytes) const {
  const auto tensor = std::ranges::find(tensors_, name, &Tensor::name);
  if (tensor == tensors_.end()) refuse("holds no tensor " + std::string{name});
  if (tensor->dtype != dtype || first > tensor->count || count > tensor->count - first) {
    refuse("its tensor " + std::string{name} + " has no elements from " + std::to_string(first) + " to " +
           std::to_string(first + count) + " of " + std::string{to_string(dtype)});
  }
  read_at(tensor->offset + first * size_of(dtype).count(), bytes.data(), bytes.size());
}

}  // namespace gpt
