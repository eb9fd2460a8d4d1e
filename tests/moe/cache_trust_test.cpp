// The packed cache: which owners' entries are trusted, which users may read them, and files that
// change while they are used.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

#include "moe/cached_model.h"
#include "support/as_nobody.h"
#include "support/attack.h"
#include "support/forked_child.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;
namespace fs = std::filesystem;

class CacheTrust : public CachedModel {};

// Another user who may write to the folder or the file could have written any weights: neither is
// trusted, with or without checksums.
ATTACK_TEST_F(kForeignCaches, CacheTrust, WhatAnotherUserMayHaveWrittenIsNotBelieved) {
  if (geteuid() != 0) GTEST_SKIP() << "giving files away needs root";
  constexpr uid_t kOther = 4711;
  const auto ignored = [&](const std::string& words) {
    for (const bool checksum : {false, true}) {
      cache_.checksum = checksum;
      attacked();
      EXPECT_NE(open(), nullptr);
      EXPECT_FALSE(outcome_.hit) << words;
      EXPECT_THAT(outcome_.reason, HasSubstr(words));
    }
    cache_.checksum = false;
  };
  open();
  const std::string entry = outcome_.path, folder = cache_.directory;
  // The file is another user's: it is replaced.
  ASSERT_EQ(chown(entry.c_str(), kOther, kOther), 0);
  attacked();
  open();
  EXPECT_FALSE(outcome_.hit);
  EXPECT_THAT(outcome_.reason, HasSubstr("or of root, got one of user 4711"));
  open();
  EXPECT_TRUE(outcome_.hit);
  // The folder is another user's: nothing is read from it and nothing is written, for any owner of
  // the entry.
  const auto content = [&] { return read_file(entry); };
  const std::string before = content();
  for (const uid_t owner : {uid_t{0}, kOther}) {
    ASSERT_EQ(chown(folder.c_str(), kOther, kOther), 0);
    ASSERT_EQ(chown(entry.c_str(), owner, owner), 0);
    ignored("expected a folder of user 0 or of root, got one of user 4711");
    EXPECT_EQ(content(), before);
    ASSERT_EQ(chown(folder.c_str(), 0, 0), 0);
  }
  ASSERT_EQ(chown(entry.c_str(), 0, 0), 0);
  // Others may write to the folder, and so may have put another file there.
  for (const mode_t mode : {0777, 0775, 0757, 02775}) {
    ASSERT_EQ(chmod(folder.c_str(), mode), 0);
    ignored("chmod go-w it");
    EXPECT_EQ(content(), before);
  }
  // Not so with the sticky bit: then they cannot.
  ASSERT_EQ(chmod(folder.c_str(), 01777), 0);
  open();
  EXPECT_TRUE(outcome_.hit) << outcome_.reason;
  // A link in a folder's place is followed, and its target is checked.
  ASSERT_EQ(chmod(folder.c_str(), 0755), 0);
  fs::create_directory(directory_.file("theirs"));
  ASSERT_EQ(chown(directory_.file("theirs").c_str(), kOther, kOther), 0);
  fs::remove_all(folder);
  fs::create_symlink(directory_.file("theirs"), folder);
  ignored("got one of user 4711");
  EXPECT_TRUE(fs::is_empty(directory_.file("theirs")));
}

// Run as a user who is not root: root's caches are used, other users' caches are not.
ATTACK_TEST_F(kForeignCaches, CacheTrust, AUserBelievesHisOwnEntriesAndThoseOfRoot) {
  if (geteuid() != 0) GTEST_SKIP() << "another user's rights need root";
  fs::permissions(directory_.path(), fs::perms(0755));
  fs::permissions(model_, fs::perms(0755));
  for (const auto& entry : fs::directory_iterator(model_))
    fs::permissions(entry.path(), fs::perms(0644));
  const mode_t old = umask(022);
  open();  // of root
  const std::string of_root = cache_.directory, theirs = directory_.file("theirs"),
                    own = directory_.file("own");
  fs::copy(of_root, theirs);
  for (const auto& entry : fs::directory_iterator(theirs))
    ASSERT_EQ(chown(entry.path().c_str(), 4711, 4711), 0);
  fs::create_directory(own);
  ASSERT_EQ(chown(own.c_str(), kNobody, kNobody), 0);
  const struct {
    const std::string& folder;
    bool hit;
    const char* reason;
  } as_nobody[] = {{of_root, true, ""},
                   {theirs, false, "a file of user 65534 or of root, got one of user 4711"},
                   {own, false, ""},
                   {own, true, ""}};
  for (const auto& [folder, hit, reason] : as_nobody) {
    attacked();
    cache_.directory = folder;
    const AsNobody nobody;
    open();
    EXPECT_EQ(outcome_.hit, hit) << folder;
    EXPECT_THAT(outcome_.reason, HasSubstr(reason));
  }
  // Nor does root trust a user's.
  attacked();
  open();
  EXPECT_FALSE(outcome_.hit);
  EXPECT_THAT(outcome_.reason, HasSubstr("got one of user 65534"));
  umask(old);
}

mode_t mode_of(const std::string& path) {
  struct stat facts {};
  EXPECT_EQ(stat(path.c_str(), &facts), 0) << path;
  return facts.st_mode & 07777;
}

// A user who may not read the checkpoint may not read its packed weights.
TEST_F(CacheTrust, EntriesHaveTheCheckpointsPermissions) {
  const mode_t old = umask(022);
  const std::string shard = model_ + "/model.safetensors";
  const bool open_above = (mode_of(directory_.path().parent_path().string()) & S_IXOTH) != 0;
  const struct {
    mode_t shard, model, above, mask;
    bool everybodys;
  } cases[] = {
      {0644, 0755, 0755, 022, true},  {0640, 0755, 0755, 022, false},
      {0644, 0700, 0755, 022, false}, {0644, 0755, 0710, 022, false},
      {0644, 0755, 0755, 077, false}, {0644, 0755, 0755, 0, true},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(&c - cases);
    fs::permissions(shard, fs::perms(c.shard));
    fs::permissions(model_, fs::perms(c.model));
    fs::permissions(directory_.path(), fs::perms(c.above));
    umask(c.mask);
    cache_.directory = directory_.file("cache" + std::to_string(&c - cases));
    open();
    const bool everybodys = c.everybodys && open_above;
    EXPECT_EQ(mode_of(cache_.directory), everybodys ? 0755u : 0700u);
    EXPECT_EQ(mode_of(outcome_.path), everybodys ? 0644u : 0600u);
  }
  umask(old);
}

// Writing to a page that is already dirty does not change its file's times.
ATTACK_TEST_F(kCacheTampering, CacheTrust, WritesThroughADirtyMappingAreSeen) {
  for (const char* base :
       {"", "/dev/shm"}) {  // a disk's file system, and one without times for such writes
    std::string memory = base + std::string("/nvfp4_moe_test_XXXXXX");
    const std::string kept = model_;
    if (*base != 0) {
      if (::mkdtemp(memory.data()) == nullptr) continue;
      model_ = memory + "/model";
      fs::copy(kept, model_);
    }
    const std::string shard = model_ + "/model.safetensors";
    // A code, far from the sample in the middle.
    const uint64_t at = place_of(checkpoint(), checkpoint().tensor_name(0, 0, "up"));
    const size_t size = fs::file_size(shard);
    const int file = ::open(shard.c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(file, 0);
    auto* const bytes =
        static_cast<uint8_t*>(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    ASSERT_NE(bytes, MAP_FAILED);
    bytes[at] ^= 0x10;  // the page is dirty from here on
    const auto first_codes = [&] {
      ExpertBuffers buffers;
      EXPECT_OK(open()->unpack_expert(0, buffers));
      return buffers.up.codes.at(0);
    };
    EXPECT_EQ(first_codes(), bytes[at]);
    for (int round = 0; round < 10; ++round) {
      bytes[at] ^= static_cast<uint8_t>(round % 2 == 0 ? 0x20 : 0x30);
      attacked();
      EXPECT_EQ(first_codes(), bytes[at]) << base << " round " << round;
      EXPECT_FALSE(outcome_.hit) << base << " round " << round;
      EXPECT_EQ(first_codes(), bytes[at]);
      EXPECT_TRUE(outcome_.hit) << outcome_.reason;
    }
    ::munmap(bytes, size);
    ::close(file);
    if (*base != 0) fs::remove_all(memory);
    model_ = kept;
  }
}

// A layer computes with the bytes that it has read, even if the entry changes later.
ATTACK_TEST_F(kCacheTampering, CacheTrust, AnEntryThatIsCutUnderALayerChangesNothing) {
  const std::vector<float> expected = run(*open());
  for (const bool unchecked : {false, true}) {
    cache_.unchecked = unchecked;
    EXPECT_NE(open(), nullptr);
    const auto layer = open();
    ASSERT_TRUE(outcome_.hit);
    fs::resize_file(outcome_.path, 0);
    EXPECT_EQ(in_forked_child([&] { return same_bits(run(*layer), expected) ? 0 : 1; }), 0);
    EXPECT_TRUE(same_bits(run(*layer), expected));
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal
