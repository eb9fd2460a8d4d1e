#include "durability/crash_images.h"

#include <algorithm>
#include <fstream>
#include <set>

#include "core/random.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kFolder = -1;  // the value of a folder in Names

struct File {
  std::string content;
  std::string synced;
};

// A folder's names: of files and of folders.
using Names = std::map<std::string, int64_t>;

// A change of one folder's names.
struct Change {
  enum Kind { kAdd, kRemove, kRename } kind;
  std::string name;
  std::string to;
  int64_t file = kFolder;
};

void apply(const Change& change, Names& names) {
  if (change.kind == Change::kAdd) {
    names[change.name] = change.file;
  } else if (change.kind == Change::kRemove) {
    names.erase(change.name);
  } else {
    // The new name may reach the disk although the old one's creation did not: a rename is one
    // change.
    names.erase(change.name);
    names[change.to] = change.file;
  }
}

struct Folder {
  Names on_disk;                // since the last sync
  std::vector<Change> changes;  // after it
};

enum class Lost { kNothing, kNames, kBytes, kZeros, kAny };

class Disk {
 public:
  explicit Disk(const Image& before) {
    folders_[""];
    int64_t number = -2;  // distinct from the record's
    for (const auto& [path, content] : before) {
      if (path.ends_with('/')) {
        const std::string name = path.substr(0, path.size() - 1);
        folders_[name];
        folders_[parent(name)].on_disk[leaf(name)] = kFolder;
      } else {
        files_[--number] = {content, content};
        folders_[parent(path)].on_disk[leaf(path)] = number;
      }
    }
  }

  void apply_call(const RecordedCall& call) {
    switch (call.kind) {
      case CallKind::kCreate:
        files_[call.file];
        change({Change::kAdd, leaf(call.path), "", call.file}, call.path);
        return;
      case CallKind::kWrite: {
        std::string& content = files_[call.file].content;
        content.resize(std::max<size_t>(content.size(), call.offset + call.bytes.size()));
        content.replace(call.offset, call.bytes.size(), call.bytes);
        return;
      }
      case CallKind::kTruncate: files_[call.file].content.resize(call.offset); return;
      case CallKind::kSync: files_[call.file].synced = files_[call.file].content; return;
      case CallKind::kSyncFolder: {
        Folder& folder = folders_[call.path];
        for (const Change& one : folder.changes) apply(one, folder.on_disk);
        folder.changes.clear();
        return;
      }
      case CallKind::kRename:
        EXPECT_EQ(parent(call.path), parent(call.to)) << "a rename across folders is not modelled";
        change({Change::kRename, leaf(call.path), leaf(call.to), number_of(call.path)}, call.path);
        return;
      case CallKind::kUnlink:
        change({Change::kRemove, leaf(call.path), "", kFolder}, call.path);
        return;
      case CallKind::kMakeFolder:
        folders_[call.path];
        change({Change::kAdd, leaf(call.path), "", kFolder}, call.path);
        return;
    }
  }

  Image image(Lost lost, uint64_t seed = 0) const {
    Image made;
    uint64_t random = mix64(seed + 1);
    add("", lost, random, made);
    return made;
  }

 private:
  static std::string parent(const std::string& path) {
    return fs::path(path).parent_path().string();
  }
  static std::string leaf(const std::string& path) { return fs::path(path).filename().string(); }

  void change(Change one, const std::string& path) {
    folders_[parent(path)].changes.push_back(std::move(one));
  }

  int64_t number_of(const std::string& path) const {
    const Folder& folder = folders_.at(parent(path));
    Names names = folder.on_disk;
    for (const Change& one : folder.changes) apply(one, names);
    return names.at(leaf(path));
  }

  void add(const std::string& path, Lost lost, uint64_t& random, Image& image) const {
    const auto coin = [&] { return ((random = mix64(random)) & 1) != 0; };
    const Folder& folder = folders_.at(path);
    Names names = folder.on_disk;
    for (const Change& one : folder.changes) {
      if (lost == Lost::kNames || (lost == Lost::kAny && coin())) continue;
      apply(one, names);
    }
    for (const auto& [name, number] : names) {
      const std::string full = path.empty() ? name : path + "/" + name;
      if (number == kFolder) {
        image[full + "/"];
        add(full, lost, random, image);
        continue;
      }
      const File& file = files_.at(number);
      std::string zeros = file.synced;
      zeros.resize(file.content.size());
      if (lost == Lost::kNothing)
        image[full] = file.content;
      else if (lost == Lost::kZeros)
        image[full] = zeros;
      else if (lost == Lost::kAny)
        image[full] = coin() ? file.content : coin() ? zeros : file.synced;
      else
        image[full] = file.synced;
    }
  }

  std::map<std::string, Folder> folders_;
  std::map<int64_t, File> files_;
};

}  // namespace

Image read_image(const fs::path& folder) {
  Image image;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string path = entry.path().lexically_relative(folder).string();
    if (entry.is_directory())
      image[path + "/"];
    else
      image[path] = read_file(entry.path().string());
  }
  return image;
}

void write_image(const Image& image, const fs::path& folder) {
  fs::create_directories(folder);
  for (const auto& [path, content] : image) {
    if (path.ends_with('/'))
      fs::create_directories(folder / path);
    else
      std::ofstream(folder / path, std::ios::binary) << content;
  }
}

Image image_of_all(const Image& before, const std::vector<RecordedCall>& calls) {
  Disk disk(before);
  for (const RecordedCall& call : calls) disk.apply_call(call);
  return disk.image(Lost::kNothing);
}

std::vector<Image> crash_images(const Image& before, const std::vector<RecordedCall>& calls,
                                size_t count) {
  Disk disk(before);
  for (size_t i = 0; i < count; ++i) disk.apply_call(calls[i]);
  std::vector<Image> images = {disk.image(Lost::kNothing), disk.image(Lost::kNames),
                               disk.image(Lost::kBytes), disk.image(Lost::kZeros)};
  for (uint64_t seed = 0; seed < 16; ++seed)
    images.push_back(disk.image(Lost::kAny, seed * 7919 + count));
  return images;
}

}  // namespace nvfp4_moe::internal::test
